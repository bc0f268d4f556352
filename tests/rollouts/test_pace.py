"""Concurrent environments: no conversation waits for a slow one, nothing hangs, and results equal a sequential run."""

import threading
import time
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from practicum import ports
from practicum.core.abandon import Cancelled, cancel_scope
from practicum.errors import VerifierError
from practicum.ports import (
    Observation,
    PromptedClient,
    SamplingClient,
)
from practicum.recipe.sections import RolloutConfig
from practicum.rollouts.conversation import run_conversations
from practicum.rollouts.openings import ConversationRequest
from practicum.rollouts.tool_use import measure_conversations
from practicum.text import Renderer, build_character_tokenizer, collect_stop_ids
from practicum.types import Message, Pace, Prompt, Rollout, Sample, SamplingParams

TOKENIZER = build_character_tokenizer("abcdef\n")
RENDERER = Renderer(TOKENIZER, stop_ids=collect_stop_ids(TOKENIZER, None))
PROMPTS = [Prompt(letter, (Message("user", letter),)) for letter in "abcdef"]
TURNS = 3


class Talker(SamplingClient):
    """Writes a letter and stops; records the sizes of its batches."""

    def __init__(self):
        self.batches = []

    def sample(self, requests, params):
        self.batches.append(len(requests))
        tokens = torch.tensor([*RENDERER.encode("b"), TOKENIZER.eos_token_id])
        logprobs = torch.full((2,), -1.0)
        return [Sample(tokens, logprobs, logprobs, "stop") for _ in requests]


class World:
    """Answers `TURNS` - 1 times; `slow` prompts wait for an event first, and `stuck` ones for ever."""

    def __init__(self, slow="", stuck="", ends_thread=""):
        self.slow, self.stuck, self.ends_thread = slow, stuck, ends_thread
        self.go_on = threading.Event()
        self.log, self.threads = [], {}
        self.running = self.most_running = 0
        self.lock = threading.Lock()

    def open(self, prompt, seed):
        return Episode(self, prompt.id)

    def reward(self, rollout):
        return 1.0


class Episode(ports.Episode):
    def __init__(self, world, name):
        self.world, self.name, self.heard = world, name, 0

    def step(self, turn):
        world = self.world
        world.threads.setdefault(self.name, set()).add(threading.get_ident())
        with world.lock:
            world.running += 1
            world.most_running = max(world.most_running, world.running)
        time.sleep(0.002)
        if self.name in world.slow or self.name in world.stuck:
            world.go_on.wait(20)
        if self.name in world.ends_thread:
            raise SystemExit
        self.heard += 1
        with world.lock:
            world.running -= 1
            world.log.append(self.name)
        if set(world.log) >= set("bcdef") and world.log.count("f") == TURNS and not world.stuck:
            world.go_on.set()
        return Observation(Message("user", 2 * self.name) if self.heard < TURNS else None)

    def close(self):
        self.world.threads[self.name].add(threading.get_ident())
        self.world.log.append(f"{self.name} closed")


def talk(world, pace, prompts=PROMPTS):
    talker = Talker()
    requests = [
        ConversationRequest(prompt, PromptedClient(talker, RENDERER.render(prompt.messages)), seed)
        for seed, prompt in enumerate(prompts)
    ]
    params = SamplingParams(64, stop_ids=RENDERER.stop_ids, pace=pace)
    return run_conversations(requests, world, RENDERER, params), talker


def list_ends(conversations):
    return [(c.sample.tokens.tolist(), c.sample.stop_reason, c.text) for c in conversations]


@pytest.mark.parametrize("pace", [Pace(3), Pace(16, 9.0), Pace(16, together=False)])
def test_results_are_those_of_one_after_another(pace):
    expected, one = talk(World(), Pace())
    world = World()
    found, side = talk(world, pace)
    assert list_ends(found) == list_ends(expected)
    assert {c.sample.stop_reason for c in found} == {"stop"}
    assert all(len(threads) == 1 for threads in world.threads.values()), "opened, stepped, closed"
    assert threading.get_ident() not in set().union(*world.threads.values())
    assert 1 < world.most_running <= pace.at_once
    if pace.together:
        assert side.batches == one.batches


def test_a_slow_environment_holds_no_fast_one():
    """The slow conversation continues only when all fast ones have ended: in one batch this would never end."""
    world = World(slow="a")
    found, _ = talk(world, Pace(16, together=False))
    assert [c.sample.stop_reason for c in found] == 6 * ["stop"]
    assert world.log.index("f closed") < world.log.index("a closed")


@pytest.mark.parametrize("together", [True, False])
def test_a_deadline_ends_its_own_conversation(together):
    world = World(stuck="c")
    began = time.monotonic()
    # One permit less than calls: the hanging call must return its permit.
    found, _ = talk(world, Pace(2, 0.5, together))
    assert time.monotonic() - began < 15
    assert [c.sample.stop_reason for c in found] == 2 * ["stop"] + ["timeout"] + 3 * ["stop"]
    assert "rollout.episodes.seconds, 0.5 s" in found[2].notes["error"]
    assert len(found[2].turns) == 1
    world.go_on.set()
    deadline = time.monotonic() + 10
    while "c closed" not in world.log and time.monotonic() < deadline:
        time.sleep(0.01)
    assert world.log.count("c closed") == 1, "its episode closes when its call returns"
    ends = [(prompt, one.sample.stop_reason) for prompt, one in zip(PROMPTS, found, strict=True)]
    rollouts = [
        replace(Rollout.from_text(prompt, ""), stop_reason=end, turns=one.turns)
        for (prompt, end), one in zip(ends, found, strict=True)
    ]
    assert measure_conversations(rollouts)["timed_out"] == pytest.approx(1 / 6)


def test_a_run_in_which_every_environment_hangs_ends():
    world = World(stuck="abcdef")
    with pytest.raises(VerifierError, match=r"all of 6 conversations.*0\.2 s"):
        talk(world, Pace(2, 0.2))
    world.go_on.set()


def test_an_environment_that_ends_its_thread_ends_its_conversation():
    found, _ = talk(World(ends_thread="d"), Pace(16))
    assert found[3].sample.stop_reason == "error"
    assert "SystemExit" in found[3].notes["error"]


def test_who_cancels_waits_for_no_environment():
    world, event = World(slow="a"), threading.Event()
    threading.Timer(0.3, event.set).start()
    with pytest.raises(Cancelled), cancel_scope(event):
        talk(world, Pace(16), PROMPTS[:1])
    world.go_on.set()


def test_a_recipe_says_how_environments_are_asked():
    episodes = {"at_once": 8, "seconds": 30, "together": False}
    config = RolloutConfig.model_validate({"episodes": episodes})
    assert config.build_sampling_params(frozenset()).pace == Pace(8, 30.0, False)
    with pytest.raises(ValidationError, match="set at_once: 16"):
        RolloutConfig.model_validate({"episodes": {"together": False}})
