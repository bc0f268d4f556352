"""A choice among more answers: failures by their share, right answers by their quality; the same seed gives the same choice."""

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import pytest
import torch
from pydantic import TypeAdapter

from practicum.methods.rstar2_agent.resample import (
    CLEAN,
    NO_CALLS,
    CleanResampler,
    compute_penalty,
)
from practicum.methods.rstar2_agent.resample import Config as Resample
from practicum.ports import (
    SamplingClient,
    Task,
)
from practicum.rollouts import RolloutBatch, RolloutWriters, SourceChoice, collect_rollouts
from practicum.rollouts.sampling import RolloutSampler
from practicum.text import Renderer, build_character_tokenizer, collect_stop_ids
from practicum.types import CallRecord, Message, Prompt, Rollout, Sample, SamplingParams, Turn

TOKENIZER = build_character_tokenizer("rfab")
RENDERER = Renderer(TOKENIZER, stop_ids=collect_stop_ids(TOKENIZER, None))
PROMPTS = [Prompt(letter, (Message("user", letter),)) for letter in "ab"]
N = 4


class Coin(SamplingClient):
    """Writes r (right) with the probability `share`, else f."""

    def __init__(self, share):
        self.share, self.count = share, 0

    def sample(self, requests, params):
        self.count += len(requests)
        return [self.say(request) for request in requests]

    def say(self, request):
        word = "r" if request.seed / 2**63 < self.share else "f"
        tokens = torch.tensor([*RENDERER.encode(word), TOKENIZER.eos_token_id])
        logprobs = torch.full((2,), -0.5)
        return Sample(tokens, logprobs, logprobs, "stop")


class RightIsR(Task):
    def train_prompts(self):
        return PROMPTS

    def heldout_prompts(self):
        return []

    def reward(self, rollout):
        return float(rollout.text.startswith("r"))


def collect(source, share=0.5, step=1):
    student = Coin(share)
    writers = RolloutWriters(student, None, RENDERER, task=RightIsR())  # type: ignore[arg-type]
    batch = RolloutBatch(PROMPTS, N, seed=3, step=step)
    chosen = TypeAdapter(SourceChoice).validate_python(source)
    return collect_rollouts(
        batch, chosen, writers, SamplingParams(4, stop_ids=RENDERER.stop_ids)
    ), student


@pytest.mark.parametrize("factor", [2, 3])
def test_failures_keep_their_share(factor):
    for step in range(1, 6):
        rollouts, student = collect(f"resample({factor})", 0.6, step)
        assert student.count == factor * N * len(PROMPTS)
        assert [rollout.sample for rollout in rollouts] == 2 * list(range(N))
        for prompt in PROMPTS:
            mine = [rollout for rollout in rollouts if rollout.prompt.id == prompt.id]
            right = sum(rollout.reward for rollout in mine)
            # The mean of all answers is in the note: the share of right answers kept equals it, up to one answer.
            sampled = float(mine[0].notes["sampled_reward"])
            assert math.floor(sampled * N) <= right <= math.ceil(sampled * N)
        means = {rollout.prompt.id: rollout.notes["sampled_reward"] for rollout in rollouts}
        expected = sum(map(float, means.values())) / 2
        assert Resample.measure(rollouts)["sampled_reward"] == pytest.approx(expected)


def test_a_share_that_is_no_number_of_answers_is_kept_in_the_mean():
    """Check one right answer of two and one to keep: each is kept in half of the steps."""
    kept = []
    for step in range(1, 60):
        batch = RolloutBatch(PROMPTS, 1, 0, step)
        choice = CleanResampler(
            Resample(), RolloutSampler(batch, RENDERER, SamplingParams(4), None), None, None
        )  # type: ignore[arg-type]
        right, wrong = make(["answered"]), replace(make(["answered"]), reward=0.0)
        (chosen,) = choice._choose("p", [wrong, right], 1)
        assert choice._choose("p", [wrong, right], 1)[0].reward == chosen.reward
        kept.append(chosen.reward)
    assert 0.3 < sum(kept) / len(kept) < 0.7


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_where_all_are_alike_any_stay(share):
    rollouts, _ = collect("resample", share)
    assert {rollout.reward for rollout in rollouts} == {share}
    again, _ = collect("resample", share)
    assert [rollout.tokens.tolist() for rollout in again] == [r.tokens.tolist() for r in rollouts]
    assert Resample.measure(collect("student")[0]) == {}


class Stated(RightIsR):
    """Finds an answer in each r of the student's turns."""

    def count_answers(self, rollout):
        return sum(reply.count("r") for reply in rollout.replies)


def make(outcomes, *replies):
    calls = tuple(CallRecord("calc", outcome) for outcome in outcomes)
    turns = [Turn("assistant", 1, "", calls=calls), Turn("tool", 1, "")]
    turns += [Turn("assistant", 1, reply) for reply in replies or ("r",)]
    return replace(Rollout.from_text(PROMPTS[0], "r"), turns=tuple(turns), reward=1.0)


def test_an_answer_is_clean_by_its_calls_and_by_its_form():
    clean, messy = make(["answered", "answered"]), make(["answered", "failed", "timeout"])
    for task in (RightIsR(), Stated()):
        assert compute_penalty(clean, task) == 0.0
        assert compute_penalty(messy, task) == pytest.approx(2 / 3)
        assert compute_penalty(make([]), task) == NO_CALLS


@pytest.mark.parametrize("turns", [1, 2, 5])
@pytest.mark.parametrize("count", range(9))
def test_the_penalty_of_a_form_is_the_published_one(turns, count):
    """Return 1 without an answer, else the answers beyond the first of a turn, at most 1 (roc.py of rStar2-Agent)."""
    # The first turn of `make` calls, and states no answer.
    rollout = make(["answered"], *["f"] * (turns - 1), "r" * count)
    expected = 1 if count == 0 else min(Fraction(count - 1, turns + 1), 1)
    assert compute_penalty(rollout, Stated()) == pytest.approx(float(expected))
    assert compute_penalty(rollout, RightIsR()) == 0.0, "a task that asks for no form"


def choose(rollouts, count, task, steps):
    """Return how often each of a prompt's answers is kept, by position."""
    kept = Counter()
    for step in range(steps):
        batch = RolloutBatch(PROMPTS, 1, seed=3, step=step)
        sampler = RolloutSampler(batch, RENDERER, SamplingParams(4), None)
        resampler = CleanResampler(Resample(), sampler, task, Coin(1.0))
        named = [replace(rollout, sample=place) for place, rollout in enumerate(rollouts)]
        kept.update(rollout.sample for rollout in resampler._choose("a", named, count))
    return kept


def enumerate_kept(weights, count):
    """Return the probability of each item to be among `count` drawn without replacement, by every order."""
    kept = [Fraction(0)] * len(weights)
    for order in permutations(range(len(weights)), count):
        chance, left = Fraction(1), sum(weights)
        for place in order:
            chance *= weights[place] / left
            left -= weights[place]
        for place in order:
            kept[place] += chance
    return kept


def test_right_answers_are_kept_by_their_weights():
    """Check that half of four right answers are kept: each as often as all orders of weighted draws predict."""
    rollouts = [
        make(["answered"]),
        make(["answered"], "rrr"),
        make(["failed", "answered"]),
        make(["answered"], "f"),
    ]
    penalties = [compute_penalty(rollout, Stated()) for rollout in rollouts]
    assert penalties == [0.0, 1.0, 0.5, 1.0]
    weights = [1 / (Fraction(str(CLEAN)) + Fraction(penalty)) for penalty in penalties]
    kept = choose(rollouts, 2, Stated(), steps := 2000)
    for place, expected in enumerate(map(float, enumerate_kept(weights, 2))):
        spread = (expected * (1 - expected) / steps) ** 0.5
        assert kept[place] / steps == pytest.approx(expected, abs=3 * spread)


def test_the_mean_penalty_is_of_all_right_answers():
    rollouts = [make(["answered"]), make(["answered"], "f"), replace(make([]), reward=0.0)]
    batch = RolloutBatch(PROMPTS, 1, seed=3, step=1)
    sampler = RolloutSampler(batch, RENDERER, SamplingParams(4), None)
    kept = CleanResampler(Resample(), sampler, Stated(), Coin(1.0))._choose("a", rollouts, 1)
    assert Resample.measure(kept)["sampled_penalty"] == 0.5
    failed = [replace(rollout, reward=0.0) for rollout in rollouts]
    kept = CleanResampler(Resample(), sampler, Stated(), Coin(1.0))._choose("a", failed, 1)
    assert Resample.measure(kept) == {"sampled_reward": 0.0}, "no right answer, no penalty"
