"""The numbers that are read off a step for its monitors: one name each in metrics.jsonl, absent where nothing is known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum.monitors.facts import RecipeFacts
from practicum.monitors.history import History
from practicum.statistics import (
    concentration,
    distinct_ngrams,
    group_pairs,
    has_low_divergence_run,
    importance_health,
    is_degenerate,
    mean_of,
    pass_at_k,
    probability_error,
    quantiles,
    unique_share,
    window_means,
)
from practicum.statistics.repetition import LONGEST_PERIOD
from practicum.training.evaluation import Evaluation, gain, surer
from practicum.training.loop import StepResult
from practicum.types import Metrics, Rollout, TokenRecord

EDGES = (0, 4, 16, 64, 256, 1024, 4096)
"""Where the bins of positions begin; the last has no end."""

FEWEST = 16
"""Tokens that a mean by position or by repetition needs."""

FAR = -10.0
"""A log-ratio of teacher to student below this is a token that the teacher would never have written."""

LOOP = 8
"""An answer loops if at least so many of its tokens, and half of them, only say again what stands before."""

WINDOW, WINDOWS, DIPS = 64, 4, 0.7
"""Agreement is looked for in windows of 64 tokens, four in a row, below the 0.7 quantile of answers' least windows (2606.09471)."""

TRAP_ROLLOUTS, TRAP_STEPS = 512, 50
"""What must have been seen before an agreement counts as unusual (2606.09471)."""

NOTHING = 1e-4
"""A mean divergence in nats below which a completion teaches nothing."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """All tokens of a step, end to end; a column is NaN where nothing is known."""

    rows: Int[Tensor, " T"]
    positions: Int[Tensor, " T"]
    learned: Bool[Tensor, " T"]
    policy_logprobs: Float[Tensor, " T"]
    outputs: TokenRecord
    repeated: Bool[Tensor, " T"]

    @classmethod
    def of(cls, result: StepResult) -> "StepTokens":
        """Those of a step."""
        lengths = torch.tensor(
            [len(rollout.tokens) for rollout in result.rollouts], dtype=torch.long
        )
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
        tokens = torch.cat([rollout.tokens for rollout in result.rollouts])
        return cls(
            rows=rows,
            positions=torch.arange(len(rows)) - starts[rows],
            learned=torch.cat([rollout.loss_mask for rollout in result.rollouts]),
            policy_logprobs=torch.cat([rollout.policy_logprobs for rollout in result.rollouts]),
            outputs=result.outputs,
            repeated=repeated(tokens, rows),
        )

    @property
    def gap(self) -> Float[Tensor, " T"]:
        """The teacher's log-probability less the student's."""
        return self.outputs.teacher_logprobs - self.outputs.logprobs

    @property
    def divergence(self) -> Float[Tensor, " T"]:
        """Reverse KL to the teacher, or the objective's own divergence where that is not known."""
        return torch.where(
            self.outputs.reverse_kl.isnan(), self.outputs.divergence, self.outputs.reverse_kl
        )


def compute_readings(result: StepResult, history: History, facts: RecipeFacts) -> Metrics:
    """Every reading of a step that can be taken."""
    if not result.rollouts or not any(len(rollout.tokens) for rollout in result.rollouts):
        return {}
    tokens, rollouts = StepTokens.of(result), result.rollouts
    readings = {
        **gaps(tokens),
        **stops(tokens, rollouts),
        **repetition(tokens, rollouts),
        **entropies(tokens),
        **by_position(tokens),
        **traps(tokens, rollouts, history, facts),
        **engine(tokens, result, facts),
        **groups(rollouts),
        **signal(tokens, rollouts, facts),
    }
    return {
        name: value
        for name, value in readings.items()
        if value is not None and math.isfinite(value)
    }


def gaps(tokens: StepTokens) -> dict[str, float | None]:
    """How far teacher and student are apart on the sampled tokens, and how few tokens hold the divergence."""
    gap = _known(tokens.gap)
    readings: dict[str, float | None] = {"concentration": concentration(_known(tokens.divergence))}
    if len(gap):
        sizes = quantiles(gap.abs(), (0.5, 0.99, 0.999))
        readings |= dict(zip(("p50_gap", "p99_gap", "p999_gap"), sizes, strict=True))
        readings |= {"negative_gaps": _share(gap < 0), "far_gaps": _share(gap < FAR)}
    return readings


def stops(tokens: StepTokens, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """The teacher's view of the tokens with which the student ended its answers."""
    ended = torch.tensor(
        [rollout.stop_reason == "stop" and rollout.source == "student" for rollout in rollouts]
    )
    last = torch.cat([tokens.rows[1:] != tokens.rows[:-1], torch.ones(1, dtype=torch.bool)])
    gap = _known(tokens.gap[last & ended[tokens.rows]])
    if len(gap) < 4:
        return {}
    middle, best = quantiles(gap, (0.5, 0.9))
    return {"stop_gap": middle, "stop_gap_p90": best}


def repetition(tokens: StepTokens, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """How much of what was written is loops, and what the teacher thinks of them beside the rest."""
    again = torch.bincount(tokens.rows[tokens.repeated], minlength=len(rollouts)).tolist()
    loops = [
        repeats >= max(LOOP, len(rollout.tokens) / 2) or is_degenerate(rollout.text)
        for repeats, rollout in zip(again, rollouts, strict=True)
    ]
    readings: dict[str, float | None] = {
        "repetition": sum(loops) / len(rollouts),
        "repeated_tokens": _share(tokens.repeated),
    }
    known = ~tokens.gap.isnan()
    said, new = (
        tokens.gap[known & tokens.repeated].double(),
        tokens.gap[known & ~tokens.repeated].double(),
    )
    if min(len(said), len(new)) >= FEWEST:
        readings["repeated_gap"] = (said.mean() - new.mean()).item()
        readings["repeated_gap_error"] = (
            (said.var() / len(said) + new.var() / len(new)).sqrt().item()
        )
    return readings


def entropies(tokens: StepTokens) -> dict[str, float | None]:
    """The mean distance between the entropies of student and teacher, nats a token."""
    return {
        "entropy_gap": _mean(
            (tokens.outputs.teacher_entropy - tokens.outputs.student_entropy).abs()
        )
    }


def by_position(tokens: StepTokens) -> dict[str, float | None]:
    """Divergence and entropies by where in the answer a token stands; `_at_16` is for positions 16 to 63."""
    columns = {
        "reverse_kl": tokens.divergence,
        "student_entropy": tokens.outputs.student_entropy,
        "teacher_entropy": tokens.outputs.teacher_entropy,
    }
    readings: dict[str, float | None] = {}
    for start, end in pairwise((*EDGES, 1 << 62)):
        inside = (tokens.positions >= start) & (tokens.positions < end)
        for name, column in columns.items():
            known = _known(column[inside])
            if len(known) >= FEWEST:
                readings[f"{name}_at_{start}"] = known.double().mean().item()
    return readings


def traps(
    tokens: StepTokens, rollouts: Sequence[Rollout], history: History, facts: RecipeFacts
) -> dict[str, float | None]:
    """The share of answers, right ones left out, over a long part of which the teacher agrees more than is usual.

    Windows are shorter where answers cannot be long: a sixteenth of the limit.
    """
    window = max(min(WINDOW, facts.longest // 16), 1)
    columns = tokens.divergence.split([len(rollout.tokens) for rollout in rollouts])
    whole = [
        (rollout, column)
        for rollout, column in zip(rollouts, columns, strict=True)
        if _whole(column, window)
    ]
    if not whole:
        return {}
    least = [window_means(column, window).min().item() for _, column in whole]
    readings: dict[str, float | None] = {"agreement": quantiles(torch.tensor(least), (DIPS,))[0]}
    usual = history.usual("agreement")
    if usual is not None and history.steps >= TRAP_STEPS and history.rollouts >= TRAP_ROLLOUTS:
        caught = [
            has_low_divergence_run(column, usual, window, WINDOWS) and (rollout.reward or 0.0) < 1.0
            for rollout, column in whole
        ]
        readings["trap_rate"] = sum(caught) / len(rollouts)
    return readings


def engine(tokens: StepTokens, result: StepResult, facts: RecipeFacts) -> dict[str, float | None]:
    """How far the sampler is from the learner on the student's own tokens, and how old those are.

    The probability error is about engines, so it is taken where both had the same weights: on completions of this step, before
    the first of its updates.
    """
    lags = sorted(result.step - 1 - rollout.policy_version for rollout in result.rollouts)
    readings: dict[str, float | None] = {
        "staleness_p95": float(lags[math.ceil(0.95 * len(lags)) - 1])
    }
    own = torch.tensor([rollout.source == "student" for rollout in result.rollouts])[tokens.rows]
    known = own & ~(tokens.policy_logprobs - tokens.outputs.logprobs).isnan()
    if not known.any():
        return readings
    same = known & _first_update(result, facts.updates)[tokens.rows]
    if same.any():
        readings["probability_error"] = probability_error(
            tokens.outputs.logprobs[same], tokens.policy_logprobs[same]
        )
    health = importance_health(tokens.outputs.logprobs[known], tokens.policy_logprobs[known])
    readings |= {
        "importance_mean": health.mean,
        "effective_share": health.effective_share,
        "chi_squared": health.chi_squared,
    }
    return readings


def groups(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """How different the student's answers to one prompt are, and how often one of them is right."""
    by_prompt = group_pairs(
        (rollout.prompt.id, rollout) for rollout in rollouts if rollout.source == "student"
    )
    several = [group for group in by_prompt.values() if len(group) > 1]
    if not several:
        return {}
    pairs = [
        distinct_ngrams([rollout.tokens.tolist() for rollout in group], 2) for group in several
    ]
    rewards = [
        [1.0 if rollout.reward >= 1.0 else 0.0 for rollout in group if rollout.reward is not None]
        for group in several
    ]
    return {
        "unique_answers": mean_of(
            [unique_share([rollout.text.strip() for rollout in group]) for group in several]
        ),
        "distinct_2": mean_of(pairs),
        **_passes([rights for rights in rewards if len(rights) > 1]),
    }


def signal(
    tokens: StepTokens, rollouts: Sequence[Rollout], facts: RecipeFacts
) -> dict[str, float | None]:
    """Shares of completions that teach something and that the teacher left unanswered, and of tokens that count nothing."""
    readings: dict[str, float | None] = {}
    supervised = torch.bincount(tokens.rows[tokens.learned], minlength=len(rollouts)) > 0
    answered = ~(tokens.divergence.isnan() & tokens.outputs.teacher_logprobs.isnan())
    heard = torch.bincount(tokens.rows[answered], minlength=len(rollouts)) > 0
    if facts.asks_teacher and supervised.any() and not tokens.outputs.logprobs.isnan().all():
        readings["unanswered"] = _share(~heard[supervised])
    size = torch.where(tokens.divergence.isnan(), tokens.gap, tokens.divergence).abs()
    if facts.asks_teacher and (answered.any() or not supervised.any()):
        sums = torch.zeros(len(rollouts), dtype=torch.float64).index_add_(
            0, tokens.rows, size.double().nan_to_num(0.0)
        )
        counts = torch.bincount(tokens.rows[~size.isnan()], minlength=len(rollouts)).clamp_min(1)
        readings["signal_share"] = _share(sums / counts >= NOTHING)
    weight = _known(tokens.outputs.weight)
    if facts.selects and len(weight):
        readings["weightless"] = _share(weight == 0)
    return readings


def compute_evaluation_readings(before: Evaluation | None, now: Evaluation, seed: int) -> Metrics:
    """What an evaluation during training says, and since the start the gain and the growth of overconfidence.

    Of their 95 % intervals the end that a monitor judges is given beside them: of the gain the upper, of the growth the lower.
    """
    readings: dict[str, float | None] = {
        "heldout_accuracy": None if now.accuracy is None else now.accuracy.mean,
        "heldout_length": now.length,
        "heldout_truncated": now.truncated,
        "heldout_entropy": now.student_entropy,
        "heldout_reverse_kl": now.reverse_kl,
        "heldout_unique": _unique(now),
    }
    if now.calibration is not None:
        readings |= {
            "heldout_confidence": now.calibration.confidence,
            "heldout_overconfidence": now.calibration.overconfidence.mean,
            "heldout_calibration_error": now.calibration.error,
        }
    grown = None if before is None else surer(before, now, seed)
    if grown is not None:
        readings |= {"heldout_surer": grown.mean, "heldout_surer_low": grown.low}
    won = None if before is None else gain(before, now, seed)
    if won is not None:
        readings |= {"heldout_gain": won.mean, "heldout_gain_high": won.high}
    return {
        name: value
        for name, value in readings.items()
        if value is not None and math.isfinite(value)
    }


def repeated(tokens: Int[Tensor, " T"], rows: Int[Tensor, " T"]) -> Bool[Tensor, " T"]:
    """`practicum.statistics.repeated_tokens` of many answers at once."""
    readings = torch.zeros(len(tokens), dtype=torch.bool)
    for period in range(1, min(LONGEST_PERIOD, len(tokens) - 1) + 1):
        again = torch.zeros(len(tokens) + 1, dtype=torch.bool)
        again[period:-1] = (tokens[period:] == tokens[:-period]) & (rows[period:] == rows[:-period])
        edges = again.int().diff(prepend=torch.zeros(1, dtype=torch.int))
        for start, end in zip(
            (edges == 1).nonzero()[:, 0].tolist(),
            (edges == -1).nonzero()[:, 0].tolist(),
            strict=True,
        ):
            if end - start >= 2 * period:
                readings[start:end] = True
    return readings


def _passes(groups: Sequence[Sequence[float]]) -> dict[str, float | None]:
    if not groups:
        return {}
    any_right = mean_of(
        [pass_at_k(len(rights), int(sum(rights)), len(rights)) for rights in groups]
    )
    each = mean_of([sum(rights) / len(rights) for rights in groups])
    assert any_right is not None and each is not None
    settled = mean_of([float(sum(rights) in (0.0, len(rights))) for rights in groups])
    return {"pass_at_n": any_right, "pass_gap": any_right - each, "settled_prompts": settled}


def _unique(evaluation: Evaluation) -> float | None:
    by_prompt = group_pairs((answer.prompt, answer.text.strip()) for answer in evaluation.answers)
    return mean_of([unique_share(texts) for texts in by_prompt.values() if len(texts) > 1])


def _first_update(result: StepResult, updates: int) -> Bool[Tensor, " B"]:
    """The completions of this step that the first of its updates learned from; see `practicum.training.loop.parts_of`."""
    prompts = list(dict.fromkeys(rollout.prompt.id for rollout in result.rollouts))
    first = {prompt for place, prompt in enumerate(prompts) if place * updates // len(prompts) == 0}
    return torch.tensor(
        [
            rollout.prompt.id in first and rollout.policy_version == result.step - 1
            for rollout in result.rollouts
        ]
    )


def _whole(column: Float[Tensor, " T"], window: int) -> bool:
    return len(column) >= window and not bool(column.isnan().any())


def _known(values: Float[Tensor, " T"]) -> Float[Tensor, " t"]:
    return values[~values.isnan()]


def _share(hits: Bool[Tensor, " T"]) -> float:
    return hits.double().mean().item()


def _mean(values: Float[Tensor, " T"]) -> float | None:
    known = _known(values)
    return known.double().mean().item() if len(known) else None
