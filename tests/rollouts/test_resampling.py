"""A choice among more answers: failures by their share, right ones by how few calls failed; the same seed gives the same."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from pydantic import TypeAdapter

from practicum.rollouts import RolloutBatch, RolloutWriters, SourceChoice, collect_rollouts
from practicum.rollouts.resampling import (
    CLEAN,
    CleanResampler,
    compute_penalty,
    measure_resampled,
)
from practicum.rollouts.sampling import RolloutSampler
from practicum.rollouts.sources import Resample
from practicum.text import Renderer, build_character_tokenizer, collect_stop_ids
from practicum.types import CallRecord, Message, Prompt, Rollout, Sample, SamplingParams, Turn

TOKENIZER = build_character_tokenizer("rfab")
RENDERER = Renderer(TOKENIZER, stop_ids=collect_stop_ids(TOKENIZER, None))
PROMPTS = [Prompt(letter, (Message("user", letter),)) for letter in "ab"]
N = 4


class Coin:
    """Says r (right) with the probability `share`, else f."""

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


class RightIsR:
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
            # The mean of all is in the note: the share of right ones kept is it, up to one answer.
            sampled = float(mine[0].notes["sampled_reward"])
            assert math.floor(sampled * N) <= right <= math.ceil(sampled * N)
        means = {rollout.prompt.id: rollout.notes["sampled_reward"] for rollout in rollouts}
        expected = sum(map(float, means.values())) / 2
        assert measure_resampled(rollouts) == {"sampled_reward": pytest.approx(expected)}


def test_a_share_that_is_no_number_of_answers_is_kept_in_the_mean():
    """One right of two and one to keep: each is kept in half of the steps."""
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
    assert measure_resampled(collect("student")[0]) == {}


def make(outcomes):
    calls = tuple(CallRecord("calc", outcome) for outcome in outcomes)
    turns = (Turn("assistant", 1, "", calls=calls), Turn("tool", 1, ""), Turn("assistant", 1, "r"))
    return replace(Rollout.from_text(PROMPTS[0], "r"), turns=turns, reward=1.0)


def test_clean_answers_are_kept_by_their_weights():
    """One of two is kept: the clean one with 1/p of the sum of both weights."""
    clean, messy = make(["answered", "answered"]), make(["answered", "failed", "timeout"])
    assert compute_penalty(clean) == CLEAN
    assert compute_penalty(messy) == pytest.approx(CLEAN + 2 / 3)
    assert compute_penalty(make([])) == CLEAN + 0.5
    counts = Counter()
    for step in range(1500):
        sampler = RolloutSampler(
            RolloutBatch(PROMPTS, 1, seed=3, step=step), RENDERER, SamplingParams(4), None
        )
        resampler = CleanResampler(Resample(), sampler, RightIsR(), Coin(1.0))
        (kept,) = resampler._choose("a", [messy, clean], 1)
        counts[len(kept.turns[0].calls)] += 1
    weights = 1 / compute_penalty(clean), 1 / compute_penalty(messy)
    expected = weights[0] / sum(weights)
    assert counts[2] / 1500 == pytest.approx(
        expected, abs=3 * (expected * (1 - expected) / 1500) ** 0.5
    )
