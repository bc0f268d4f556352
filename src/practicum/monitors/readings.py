"""The readings of a step, computed for its monitors; metrics.jsonl has each reading under its own
name.

A reading that cannot be computed is absent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum.monitors.facts import RecipeFacts
from practicum.monitors.history import History
from practicum.pictures import is_picture
from practicum.statistics import (
    Estimate,
    compare_turns,
    concentration,
    distinct_ngrams,
    group_pairs,
    has_low_divergence_run,
    importance_health,
    is_degenerate,
    judge_turns,
    mean_of,
    pass_at_k,
    probability_error,
    quantiles,
    unique_share,
    window_means,
)
from practicum.statistics.heldout import Evaluation, compare_accuracy, compare_overconfidence
from practicum.statistics.repetition import LONGEST_PERIOD
from practicum.statistics.signal import MIN_CONSTANT_TOKENS, constant
from practicum.types import Metrics, Rollout, StepResult, TokenRecord

EDGES = (0, 4, 16, 64, 256, 1024, 4096)
"""The first positions of the position bins; the last bin has no end."""

MIN_TOKENS = 16
"""The number of tokens that a mean by position or by repetition needs."""

FAR_GAP = -10.0
"""The log-ratio of teacher to student below which the teacher would never have written a token."""

MIN_LOOP_TOKENS = 8
"""A completion loops if half of its tokens, and at least this number, repeat earlier ones."""

WINDOW, WINDOWS, LOW_QUANTILE = 64, 4, 0.7
"""A trap is a run of four windows of 64 tokens with divergence below the 0.7 quantile of the
completions' lowest windows (2606.09471)."""

TRAP_ROLLOUTS, TRAP_STEPS = 512, 50
"""The rollouts and steps to see before agreement can count as unusual (2606.09471)."""

MIN_SIGNAL = 1e-4
"""The mean divergence, in nats per token, from which on a completion has signal."""

Readings = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class StepTokens:
    """All tokens of a step, concatenated; a column is NaN at tokens where it is not known."""

    rows: Int[Tensor, " T"]
    """The index of each token's rollout."""
    positions: Int[Tensor, " T"]
    """The position of each token within its completion."""
    loss_mask: Bool[Tensor, " T"]
    policy_logprobs: Float[Tensor, " T"]
    outputs: TokenRecord
    is_repeated: Bool[Tensor, " T"]

    @classmethod
    def of(cls, result: StepResult) -> "StepTokens":
        """Concatenate the tokens of a step's rollouts."""
        rollouts = result.rollouts
        lengths = torch.tensor([len(rollout.tokens) for rollout in rollouts], dtype=torch.long)
        rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
        tokens = torch.cat([rollout.tokens for rollout in rollouts])
        return cls(
            rows=rows,
            positions=torch.arange(len(rows)) - starts[rows],
            loss_mask=torch.cat([rollout.loss_mask for rollout in rollouts]),
            policy_logprobs=torch.cat([rollout.policy_logprobs for rollout in rollouts]),
            outputs=result.outputs,
            is_repeated=mark_repeated_tokens(tokens, rows) & ~is_picture(tokens),
        )

    @property
    def gap(self) -> Float[Tensor, " T"]:
        """The teacher's log-probability minus the student's."""
        return self.outputs.teacher_logprobs - self.outputs.logprobs

    @property
    def divergence(self) -> Float[Tensor, " T"]:
        """The reverse KL to the teacher, or the objective's own divergence if it is not known."""
        outputs = self.outputs
        return torch.where(outputs.reverse_kl.isnan(), outputs.divergence, outputs.reverse_kl)


def compute_readings(result: StepResult, history: History, facts: RecipeFacts) -> Metrics:
    """Compute all readings of a step; `history` ends at the step before."""
    if not any(len(rollout.tokens) for rollout in result.rollouts):
        return {}
    tokens, rollouts = StepTokens.of(result), result.rollouts
    return _drop_unknown(
        measure_gaps(tokens)
        | measure_stops(tokens, rollouts)
        | measure_repetition(tokens, rollouts)
        | measure_entropy_gap(tokens)
        | measure_by_position(tokens)
        | measure_by_turn(tokens, rollouts)
        | measure_traps(tokens, rollouts, history, facts)
        | measure_engine(tokens, result, facts)
        | measure_groups(rollouts)
        | measure_signal(tokens, rollouts, facts)
        | measure_constancy(tokens, rollouts, facts)
    )


def _drop_unknown(readings: Mapping[str, float | None]) -> Metrics:
    return {
        name: value
        for name, value in readings.items()
        if value is not None and math.isfinite(value)
    }


def measure_by_turn(tokens: StepTokens, rollouts: Sequence[Rollout]) -> Readings:
    """Measure agreement in the student's first and last turns, and mistakes after a mistake."""
    if not any(rollout.turns for rollout in rollouts):
        return {}
    lengths = [len(rollout.tokens) for rollout in rollouts]
    columns = (tokens.outputs.teacher_logprobs, tokens.divergence)
    logprobs, distances = (
        [_list_numbers(part) for part in column.split(lengths)] for column in columns
    )
    return dict(
        compare_turns(
            [
                judge_turns(rollout.turns, *numbers)
                for rollout, *numbers in zip(rollouts, logprobs, distances, strict=True)
                # A teacher's conversation has no information about the student's mistakes.
                if rollout.source == "student"
            ]
        )
    )


def _list_numbers(values: Float[Tensor, " T"]) -> list[float | None]:
    """Return the values with None for NaN."""
    return [None if math.isnan(value) else value for value in values.tolist()]


def measure_gaps(tokens: StepTokens) -> Readings:
    """Measure the gaps between teacher and student on the sampled tokens, and how few dominate."""
    gap = _drop_nan(tokens.gap)
    readings: Readings = {"concentration": concentration(_drop_nan(tokens.divergence))}
    if len(gap):
        sizes = quantiles(gap.abs(), (0.5, 0.99, 0.999))
        readings |= dict(zip(("p50_gap", "p99_gap", "p999_gap"), sizes, strict=True))
        readings["negative_gaps"] = _compute_share(gap < 0)
        readings["far_gaps"] = _compute_share(gap < FAR_GAP)
    return readings


def measure_stops(tokens: StepTokens, rollouts: Sequence[Rollout]) -> Readings:
    """Measure the teacher's gap at the student's stop tokens; needs at least four stop tokens."""
    stops = [rollout.stop_reason == "stop" and rollout.source == "student" for rollout in rollouts]
    is_last = torch.cat([tokens.rows[1:] != tokens.rows[:-1], torch.ones(1, dtype=torch.bool)])
    gap = _drop_nan(tokens.gap[is_last & torch.tensor(stops)[tokens.rows]])
    if len(gap) < 4:
        return {}
    middle, best = quantiles(gap, (0.5, 0.9))
    return {"stop_gap": middle, "stop_gap_p90": best}


def measure_repetition(tokens: StepTokens, rollouts: Sequence[Rollout]) -> Readings:
    """Measure the share of loops, and the teacher's gap at repeated tokens against all others."""
    counts = torch.bincount(tokens.rows[tokens.is_repeated], minlength=len(rollouts)).tolist()
    loops = [
        count >= max(MIN_LOOP_TOKENS, len(rollout.tokens) / 2) or is_degenerate(rollout.text)
        for count, rollout in zip(counts, rollouts, strict=True)
    ]
    readings: Readings = {
        "repetition": sum(loops) / len(rollouts),
        "repeated_tokens": _compute_share(tokens.is_repeated),
    }
    repeats = _drop_nan(tokens.gap[tokens.is_repeated]).double()
    other_gaps = _drop_nan(tokens.gap[~tokens.is_repeated]).double()
    if min(len(repeats), len(other_gaps)) >= MIN_TOKENS:
        # This is Welch's error: the two groups differ in size and in spread.
        variance = repeats.var() / len(repeats) + other_gaps.var() / len(other_gaps)
        readings["repeated_gap"] = (repeats.mean() - other_gaps.mean()).item()
        readings["repeated_gap_error"] = variance.sqrt().item()
    return readings


def measure_entropy_gap(tokens: StepTokens) -> Readings:
    """Compute the mean distance between the entropies of student and teacher, in nats per token."""
    gaps = _drop_nan((tokens.outputs.teacher_entropy - tokens.outputs.student_entropy).abs())
    return {"entropy_gap": gaps.double().mean().item() if len(gaps) else None}


def measure_by_position(tokens: StepTokens) -> Readings:
    """Compute mean divergence and entropies by position; `_at_16` is for positions 16 to 63."""
    columns = {
        "reverse_kl": tokens.divergence,
        "student_entropy": tokens.outputs.student_entropy,
        "teacher_entropy": tokens.outputs.teacher_entropy,
    }
    readings: Readings = {}
    for start, end in pairwise((*EDGES, 1 << 62)):
        is_inside = (tokens.positions >= start) & (tokens.positions < end)
        for name, column in columns.items():
            values = _drop_nan(column[is_inside])
            if len(values) >= MIN_TOKENS:
                readings[f"{name}_at_{start}"] = values.double().mean().item()
    return readings


def measure_traps(
    tokens: StepTokens, rollouts: Sequence[Rollout], history: History, facts: RecipeFacts
) -> Readings:
    """Measure the share of traps: wrong completions with a long part of unusual agreement.

    If completions cannot be long, a window is a sixteenth of their limit.
    """
    window = max(min(WINDOW, facts.max_new_tokens // 16), 1)
    columns = tokens.divergence.split([len(rollout.tokens) for rollout in rollouts])
    scored = [
        (rollout, column)
        for rollout, column in zip(rollouts, columns, strict=True)
        if len(column) >= window and not bool(column.isnan().any())
    ]
    if not scored:
        return {}
    lowest = torch.tensor([window_means(column, window).min().item() for _, column in scored])
    readings: Readings = {"agreement": quantiles(lowest, (LOW_QUANTILE,))[0]}
    # "Unusual" is measured against the run so far: the median of this reading in earlier steps.
    usual = history.compute_median("agreement")
    if usual is not None and history.steps >= TRAP_STEPS and history.rollouts >= TRAP_ROLLOUTS:
        traps = [
            has_low_divergence_run(column, usual, window, WINDOWS) and (rollout.reward or 0.0) < 1.0
            for rollout, column in scored
        ]
        readings["trap_rate"] = sum(traps) / len(rollouts)
    return readings


def measure_engine(tokens: StepTokens, result: StepResult, facts: RecipeFacts) -> Readings:
    """Measure the sampler against the learner on the student's own tokens, and their staleness."""
    rollouts = result.rollouts
    lags = sorted(result.step - 1 - rollout.policy_version for rollout in rollouts)
    readings: Readings = {"staleness_p95": float(lags[math.ceil(0.95 * len(lags)) - 1])}
    learner, sampler = tokens.outputs.logprobs, tokens.policy_logprobs
    is_student = torch.tensor([rollout.source == "student" for rollout in rollouts])[tokens.rows]
    is_known = is_student & ~(sampler - learner).isnan()
    if not is_known.any():
        return readings
    # The error is one of engines, so it needs equal weights on both sides: completions sampled for
    # this step and scored before its first update.
    is_same = is_known & _mark_first_update(result, facts.updates_per_step)[tokens.rows]
    if is_same.any():
        readings["probability_error"] = probability_error(learner[is_same], sampler[is_same])
    health = importance_health(learner[is_known], sampler[is_known])
    return readings | {
        "importance_mean": health.mean,
        "effective_share": health.effective_share,
        "chi_squared": health.chi_squared,
    }


def measure_groups(rollouts: Sequence[Rollout]) -> Readings:
    """Measure the diversity of the student's completions of one prompt, and their success."""
    by_prompt = group_pairs(
        (rollout.prompt.id, rollout) for rollout in rollouts if rollout.source == "student"
    )
    groups = [group for group in by_prompt.values() if len(group) > 1]
    if not groups:
        return {}
    token_lists = [[rollout.tokens.tolist() for rollout in group] for group in groups]
    texts = [[rollout.text.strip() for rollout in group] for group in groups]
    rewards = [
        [float(rollout.reward >= 1.0) for rollout in group if rollout.reward is not None]
        for group in groups
    ]
    return {
        "unique_answers": mean_of(map(unique_share, texts)),
        "distinct_2": mean_of([distinct_ngrams(tokens, 2) for tokens in token_lists]),
        **_measure_passes([group for group in rewards if len(group) > 1]),
    }


def measure_signal(tokens: StepTokens, rollouts: Sequence[Rollout], facts: RecipeFacts) -> Readings:
    """Measure the shares of unanswered completions, completions with signal, and zero weights."""
    readings: Readings = {}
    is_supervised = torch.bincount(tokens.rows[tokens.loss_mask], minlength=len(rollouts)) > 0
    is_answered = ~(tokens.divergence.isnan() & tokens.outputs.teacher_logprobs.isnan())
    has_answer = torch.bincount(tokens.rows[is_answered], minlength=len(rollouts)) > 0
    # Without any student log-probability the step ran no update, which is not the teacher's fault.
    if facts.needs_teacher and is_supervised.any() and not tokens.outputs.logprobs.isnan().all():
        readings["unanswered"] = _compute_share(~has_answer[is_supervised])
    size = torch.where(tokens.divergence.isnan(), tokens.gap, tokens.divergence).abs()
    if facts.needs_teacher and (is_answered.any() or not is_supervised.any()):
        sums = torch.zeros(len(rollouts), dtype=torch.float64).index_add_(
            0, tokens.rows, size.double().nan_to_num(0.0)
        )
        counts = torch.bincount(tokens.rows[~size.isnan()], minlength=len(rollouts)).clamp_min(1)
        readings["signal_share"] = _compute_share(sums / counts >= MIN_SIGNAL)
    weight = _drop_nan(tokens.outputs.weight)
    if facts.has_token_weights and len(weight):
        readings["weightless"] = _compute_share(weight == 0)
    return readings


def measure_constancy(
    tokens: StepTokens, rollouts: Sequence[Rollout], facts: RecipeFacts
) -> Readings:
    """Measure the share of completions in which all tokens have the same teacher score.

    Only completions with eight scored tokens or more are counted, as in `constant`. A teacher that
    repeats its scores by design, such as a teacher that scores spans, is not judged.
    """
    if facts.repeats_scores:
        return {}
    columns = tokens.outputs.teacher_logprobs.split([len(rollout.tokens) for rollout in rollouts])
    scored = [
        scores for column in columns if len(scores := _drop_nan(column)) >= MIN_CONSTANT_TOKENS
    ]
    if not scored:
        return {}
    return {
        "constant_teacher": sum(constant(scores) is not None for scores in scored) / len(scored)
    }


def compute_evaluation_readings(
    before: Evaluation | None, current: Evaluation, seed: int
) -> Metrics:
    """Compute the readings of an evaluation during training, and its gains over `before`.

    The gain in accuracy comes with the upper end of its 95 % interval, and the growth of
    overconfidence with the lower end, because monitors judge these ends.
    """
    readings: Readings = {
        "heldout_accuracy": None if current.accuracy is None else current.accuracy.mean,
        "heldout_length": current.length,
        "heldout_truncated": current.truncated,
        "heldout_entropy": current.student_entropy,
        "heldout_reverse_kl": current.reverse_kl,
        "heldout_unique": _measure_uniqueness(current),
    }
    if current.calibration is not None:
        readings |= {
            "heldout_confidence": current.calibration.confidence,
            "heldout_overconfidence": current.calibration.overconfidence.mean,
            "heldout_calibration_error": current.calibration.error,
        }
    growth = None if before is None else compare_overconfidence(before, current, seed)
    if growth is not None:
        readings |= {"heldout_surer": growth.mean, "heldout_surer_low": growth.low}
    accuracy_gain = None if before is None else compare_accuracy(before, current, seed)
    if accuracy_gain is not None:
        readings |= {"heldout_gain": accuracy_gain.mean, "heldout_gain_high": accuracy_gain.high}
    if before is not None and before.reverse_kl is not None and current.reverse_kl is not None:
        readings["heldout_reverse_kl_rise"] = current.reverse_kl - before.reverse_kl
    if current.reverse_kl_estimate is not None:
        old = None if before is None else before.reverse_kl_estimate
        readings |= _compute_estimate_readings(current.reverse_kl_estimate, old)
    return _drop_unknown(readings)


def _compute_estimate_readings(current: Estimate, before: Estimate | None) -> Readings:
    """Compute the readings of an estimated divergence, and the lower end of its 95 % rise."""
    readings: Readings = {
        "heldout_reverse_kl_estimate": current.mean,
        "heldout_reverse_kl_estimate_se": current.se,
    }
    bound = None if before is None else before.bound_difference(current)
    if before is not None and bound is not None:
        readings["heldout_reverse_kl_estimate_rise_low"] = current.mean - before.mean - bound
    return readings


def mark_repeated_tokens(tokens: Int[Tensor, " T"], rows: Int[Tensor, " T"]) -> Bool[Tensor, " T"]:
    """Compute `practicum.statistics.repeated_tokens` of many completions at once, [T]."""
    is_repeated = torch.zeros(len(tokens), dtype=torch.bool)
    # A run of tokens that each equal the token `period` places earlier is a repetition if it is at
    # least two periods long. Padding on both ends gives each run two edges; `rows` ends it with its row.
    for period in range(1, min(LONGEST_PERIOD, len(tokens) - 1) + 1):
        is_equal = torch.zeros(len(tokens) + 1, dtype=torch.bool)
        is_equal[period:-1] = (tokens[period:] == tokens[:-period]) & (
            rows[period:] == rows[:-period]
        )
        edges = is_equal.int().diff(prepend=torch.zeros(1, dtype=torch.int))
        starts, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if end - start >= 2 * period:
                is_repeated[start:end] = True
    return is_repeated


def _measure_passes(groups: Sequence[Sequence[float]]) -> Readings:
    """Measure the success of groups; each lists 1 for every right completion and 0 for every wrong completion."""
    if not groups:
        return {}
    any_right = mean_of([pass_at_k(len(group), int(sum(group)), len(group)) for group in groups])
    accuracy = mean_of([sum(group) / len(group) for group in groups])
    assert any_right is not None and accuracy is not None
    settled = mean_of([float(sum(group) in (0.0, len(group))) for group in groups])
    return {"pass_at_n": any_right, "pass_gap": any_right - accuracy, "settled_prompts": settled}


def _measure_uniqueness(evaluation: Evaluation) -> float | None:
    by_prompt = group_pairs((answer.prompt, answer.text.strip()) for answer in evaluation.answers)
    return mean_of([unique_share(texts) for texts in by_prompt.values() if len(texts) > 1])


def _mark_first_update(result: StepResult, updates: int) -> Bool[Tensor, " B"]:
    """Mark the rollouts of this step's own weights in the mini-batch of its first update, [B]."""
    # `practicum.training.loop` splits the prompts of a step into mini-batches by the same formula.
    prompts = list(dict.fromkeys(rollout.prompt.id for rollout in result.rollouts))
    first = {prompt for index, prompt in enumerate(prompts) if index * updates // len(prompts) == 0}
    version = result.step - 1
    is_first = [
        rollout.prompt.id in first and rollout.policy_version == version
        for rollout in result.rollouts
    ]
    return torch.tensor(is_first)


def _drop_nan(values: Float[Tensor, " T"]) -> Float[Tensor, " t"]:
    return values[~values.isnan()]


def _compute_share(hits: Bool[Tensor, " T"]) -> float:
    return hits.double().mean().item()
