"""A choice among more answers: failures by their share, right answers by their quality."""

from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch
from pydantic import TypeAdapter

from practicum.methods.rstar2_agent.resample import (
    NO_CALLS,
    CleanResampler,
    compute_penalty,
    share_places,
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


def share_as_released(right, failures, count, least):
    """Return the numbers of kept failures and correct answers by the branches of the released `roc.py`."""
    total = right + failures
    zero, other = round(failures * count / total), round(right * count / total)
    if zero <= min(least, failures):
        zero = min(least, failures)
        other = count - zero
    if other <= min(least, right):
        other = min(least, right)
        zero = count - other
    return zero, other


@pytest.mark.parametrize(("count", "least"), [(4, 2), (8, 2), (8, 0), (16, 2), (6, 3)])
@pytest.mark.parametrize("factor", [2, 3, 4])
def test_the_places_are_shared_as_in_the_released_code(count, least, factor):
    for right in range(factor * count + 1):
        failures = factor * count - right
        zero, other = share_as_released(right, failures, count, least)
        places = share_places(right, failures, count, least)
        # Where the two rounded shares do not add up, the released code stops at an assertion.
        if zero + other == count:
            assert places == other
        assert min(least, right) <= places <= right
        assert min(least, failures) <= count - places <= failures


@pytest.mark.parametrize("factor", [2, 3])
def test_failures_keep_their_share(factor):
    for step in range(1, 6):
        rollouts, student = collect(f"resample({factor}, 1)", 0.6, step)
        assert student.count == factor * N * len(PROMPTS)
        assert [rollout.sample for rollout in rollouts] == 2 * list(range(N))
        for prompt in PROMPTS:
            mine = [rollout for rollout in rollouts if rollout.prompt.id == prompt.id]
            right = sum(rollout.reward for rollout in mine)
            sampled = round(float(mine[0].notes["sampled_reward"]) * factor * N)
            assert right == share_places(sampled, factor * N - sampled, N, 1)
        means = {rollout.prompt.id: rollout.notes["sampled_reward"] for rollout in rollouts}
        expected = sum(map(float, means.values())) / 2
        assert Resample.measure(rollouts)["sampled_reward"] == pytest.approx(expected)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_prompt_with_equal_rewards_has_no_loss(share):
    rollouts, _ = collect("resample", share)
    assert {rollout.reward for rollout in rollouts} == {share}
    assert not any(rollout.loss_mask.any() for rollout in rollouts)
    again, _ = collect("resample", share)
    assert [rollout.tokens.tolist() for rollout in again] == [r.tokens.tolist() for r in rollouts]
    assert Resample.measure(collect("student")[0]) == {}


def test_minimums_fit_into_the_kept_answers():
    assert not Resample(least=2).list_problems(4, 8)
    (problem,) = Resample(least=2).list_problems(3, 8)
    assert "resample(least=2) keeps at least 2 failures and 2 correct answers" in problem


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


def choose(rollouts, count, task=None, least=0):
    """Return the answers that are kept of a prompt's, by position."""
    sampler = RolloutSampler(RolloutBatch(PROMPTS, 1, 3, 1), RENDERER, SamplingParams(4), None)
    resampler = CleanResampler(Resample(least=least), sampler, task or Stated(), Coin(1.0))
    return resampler._choose(
        [replace(rollout, sample=place) for place, rollout in enumerate(rollouts)], count
    )


def test_the_cleanest_right_answers_and_the_first_failures_are_kept():
    """Check every order of two clean, one messy and one broken right answer among four failures."""
    clean, messy, broken = make(["answered"]), make(["failed", "answered"]), make([], "f")
    # A failure's penalty does not matter: the last sampled one is the cleanest here.
    failures = [replace(rollout, reward=0.0) for rollout in (broken, messy, broken, clean)]
    right = [broken, clean, messy, clean]
    for places in product(range(5), repeat=2):
        mixed = list(failures)
        for place, rollout in zip((places[0], places[1], 0, 4), right, strict=True):
            mixed.insert(place, rollout)
        kept = choose(mixed, 4)
        assert [rollout.sample for rollout in kept] == sorted(rollout.sample for rollout in kept)
        good = [rollout for rollout in kept if rollout.reward == 1.0]
        assert [compute_penalty(rollout, Stated()) for rollout in good] == [0.0, 0.0]
        bad = [place for place, rollout in enumerate(mixed) if rollout.reward == 0.0]
        assert [rollout.sample for rollout in kept if rollout.reward == 0.0] == bad[:2]
        assert all(rollout.loss_mask.equal(mixed[rollout.sample].loss_mask) for rollout in kept)


def test_at_least_two_of_both_are_kept():
    right, failure = make(["answered"]), replace(make([]), reward=0.0)
    for least, expected in ((0, 3), (1, 3), (2, 2)):
        kept = choose([failure, failure, *[right] * 6], 4, least=least)
        assert sum(rollout.reward or 0 for rollout in kept) == expected


def test_the_mean_penalty_is_of_all_right_answers():
    rollouts = [make(["answered"]), make(["answered"], "f"), replace(make([]), reward=0.0)]
    kept = choose(rollouts, 1)
    assert Resample.measure(kept)["sampled_penalty"] == 0.5
    failed = [replace(rollout, reward=0.0) for rollout in rollouts]
    kept = choose(failed, 1)
    assert Resample.measure(kept) == {"sampled_reward": 0.0}, "no right answer, no penalty"
