"""Prompts of a step are a function of (seed, step); every completion has a separate random stream."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from practicum.core.randomness import seed_of
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    SamplingClient,
    Task,
)
from practicum.rollouts import RolloutBatch, add_rewards, sample_rollouts, select_prompts
from practicum.text import Renderer, build_character_tokenizer, collect_stop_ids
from practicum.types import (
    Message,
    Prompt,
    Rollout,
    Sample,
    SampleRequest,
    SamplingParams,
    ScoreRequest,
    TeacherSignal,
)

PROMPTS = [
    Prompt(f"p{number}", (Message("user", letter),), answer=letter)
    for number, letter in enumerate("abcdefg")
]
PARTS = st.lists(st.integers() | st.text(max_size=4), min_size=1, max_size=4)


@given(PARTS, PARTS)
def test_seeds_differ_where_their_names_differ(one, two):
    assert (seed_of(*one) == seed_of(*two)) == (one == two)
    assert 0 <= seed_of(*one) < 2**63


def test_no_name_can_pass_for_two():
    assert seed_of("a\x1fint:1") != seed_of("a", 1)
    assert seed_of("1") != seed_of(1)
    assert seed_of("a", "b") != seed_of("b", "a")
    assert seed_of("lone \ud800 surrogate") != seed_of("lone ? surrogate")


def test_seeds_stay_what_they_are():
    """Check that a saved run is resumed with the seeds of the version that began it."""
    assert seed_of(0, "rollout", 1, "p0", 0) == 478911940246625988


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 3))
def test_every_prompt_comes_once_an_epoch(count, total, seed):
    prompts = [Prompt(str(number), ()) for number in range(total)]
    seen = [
        prompt.id
        for step in range(1, total + 1)
        for prompt in select_prompts(prompts, seed, step, count)
    ]
    assert len(seen) == total * count
    for start in range(0, len(seen), total):
        assert sorted(seen[start : start + total]) == sorted(prompt.id for prompt in prompts)


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed, epoch):
        return tuple(prompt.id for prompt in select_prompts(PROMPTS, seed, epoch, len(PROMPTS)))

    orders = {order(seed, epoch) for seed in range(4) for epoch in range(1, 5)}
    assert len(orders) == 16
    assert order(1, 3) == order(1, 3)


@dataclass
class Scripted(SamplingClient):
    """Answers each request with the letter a, repeated by the seed's last digit, and the stop token."""

    asked: list[SampleRequest] = field(default_factory=list)

    def sample(self, requests, params) -> list[Sample]:
        self.asked += requests
        return [self._answer(request, params) for request in requests]

    def _answer(self, request: SampleRequest, params: SamplingParams) -> Sample:
        tokens = torch.tensor([7] * (request.seed % 4) + [2])
        logprobs = torch.full(tokens.shape, -0.5)
        return Sample(tokens, logprobs, logprobs - 1, "stop")

    def score(self, requests: list[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        raise NotImplementedError

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset())


@pytest.fixture
def renderer():
    tokenizer = build_character_tokenizer("abcdefg")
    return Renderer(tokenizer, stop_ids=collect_stop_ids(tokenizer, None))


def test_rollouts_carry_what_was_sampled(renderer):
    client = Scripted()
    batch = RolloutBatch(PROMPTS[:3], n=2, seed=5, step=4)
    rollouts = sample_rollouts(batch, client, renderer, SamplingParams(8))
    assert [(rollout.prompt.id, rollout.sample) for rollout in rollouts] == list(
        itertools.product(("p0", "p1", "p2"), (0, 1))
    )
    for rollout, request in zip(rollouts, client.asked, strict=True):
        assert request.seed == seed_of(5, "rollout", 4, rollout.prompt.id, rollout.sample)
        assert (
            rollout.prompt_tokens
            == request.prompt_tokens
            == renderer.render(rollout.prompt.messages)
        )
        assert rollout.text == "a" * (request.seed % 4)
        assert rollout.tokens.tolist() == [7] * (request.seed % 4) + [2]
        assert rollout.loss_mask.all()
        assert len(rollout.loss_mask) == len(rollout.tokens)
        assert (rollout.sampling_logprobs == -0.5).all()
        assert (rollout.policy_logprobs == -1.5).all()
        assert (rollout.policy_version, rollout.stop_reason, rollout.reward) == (3, "stop", None)


def test_a_prompt_that_comes_twice_in_a_step_goes_on_counting(renderer):
    client = Scripted()
    twice = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    rollouts = sample_rollouts(
        RolloutBatch(twice, n=2, seed=0, step=1), client, renderer, SamplingParams(8)
    )
    names = [(rollout.prompt.id, rollout.sample) for rollout in rollouts]
    assert names == [("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1), ("p0", 2), ("p0", 3)]
    assert len({request.seed for request in client.asked}) == 6


def test_streams_steps_and_seeds_draw_differently(renderer):
    base = RolloutBatch(PROMPTS[:1], n=1, seed=0, step=1)
    batches = [
        base,
        replace(base, stream="evaluation"),
        replace(base, step=2),
        replace(base, seed=1),
    ]
    clients = [Scripted() for _ in batches]
    for batch, client in zip(batches, clients, strict=True):
        sample_rollouts(batch, client, renderer, SamplingParams(8))
    assert len({client.asked[0].seed for client in clients}) == 4


class Length(Task):
    """Rewards the length of an answer; prompts without an answer get no reward."""

    def train_prompts(self):
        return PROMPTS

    def heldout_prompts(self):
        return []

    def reward(self, rollout: Rollout) -> float | None:
        return None if rollout.prompt.answer is None else float(len(rollout.text))


def test_rewards_are_the_tasks_own(renderer):
    prompts = [PROMPTS[0], replace(PROMPTS[1], answer=None)]
    rollouts = sample_rollouts(
        RolloutBatch(prompts, n=1, seed=0, step=1), Scripted(), renderer, SamplingParams(8)
    )
    result = add_rewards(rollouts, Length())
    assert [rollout.reward for rollout in result] == [float(len(rollouts[0].text)), None]
    assert [rollout.reward for rollout in rollouts] == [None, None]
