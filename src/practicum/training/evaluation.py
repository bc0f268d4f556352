"""Evaluate a model on held-out prompts: rewards, distance to its teacher, intervals."""

import math
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from practicum import functional as F
from practicum.core.waits import show_wait
from practicum.objective import Full, Sampled, compare_signals, read_tokens
from practicum.objective.passes import (
    build_score_requests,
    group_rows_into_passes,
    pack_signals,
)
from practicum.ports import SamplingClient, Task, Teacher
from practicum.ports.notes import Note, NoteMoment
from practicum.rollouts import (
    RolloutBatch,
    add_notes,
    add_rewards,
    as_environment,
    sample_rollouts,
    sample_teacher_rollouts,
)
from practicum.statistics import (
    Interval,
    calibration_error,
    difference,
    equal_share,
    group_pairs,
    is_looping,
    majority_agreement,
    mean_score,
)
from practicum.text import Renderer
from practicum.training.forensics import TokenTrace, choose_traced, read_trace, trace
from practicum.types import CallOutcome, Datum, Prompt, Rollout, SamplingParams, TeacherSignal

COMPARED_TOKENS = 128
"""The tokens whose full distributions are compared at once."""

COMPARED_TEXTS_TOKENS = 1024
"""The tokens of the texts, prompts included, whose signals are compared together."""


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """The held-out prompts, the number of completions of each, and the sampling parameters."""

    prompts: Sequence[Prompt]
    samples: int
    sampling: SamplingParams
    seed: int

    @property
    def batch(self) -> RolloutBatch:
        """Return the completions to sample, the same in every evaluation of a run."""
        return RolloutBatch(self.prompts, self.samples, self.seed, step=1, stream="evaluation")


@dataclass(frozen=True, slots=True)
class GradedCompletion:
    """One held-out completion with its prompt, the expected answer and its reward.

    `logprob` is the mean log-probability per token under the model that wrote it, untempered, and
    `calls` the outcome of each call of a tool.
    """

    prompt: str
    question: str
    expected: str | None
    text: str
    reward: float | None
    tokens: int = 0
    logprob: float | None = None
    calls: list[CallOutcome] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The mean confidence, its excess over the share of right answers, and the calibration error.

    `confidences` defines confidence. The error is the expected calibration error over bins of
    equally many prompts; see `practicum.statistics.calibration_error`.
    """

    confidence: float
    overconfidence: Interval
    error: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results on all held-out prompts.

    `scores` is each prompt's mean reward, empty if the task gives none. `by_domain` is the accuracy
    on the prompts of each domain. `traces` shows the first few answers token by token.
    `calibration` is None if no answer has a reward or a confidence.
    """

    answers: list[GradedCompletion]
    scores: list[float]
    accuracy: Interval | None
    length: float
    truncated: float
    student_entropy: float | None
    reverse_kl: float | None
    by_domain: dict[str, Interval] = field(default_factory=dict)
    traces: list[TokenTrace] = field(default_factory=list)
    calibration: Calibration | None = None

    def summarize(self) -> dict[str, Any]:
        """Return the numbers for `summary.json`, without answers, scores and traces."""
        numbers = asdict(self)
        del numbers["answers"], numbers["scores"], numbers["traces"]
        texts = group_pairs((answer.prompt, answer.text.strip()) for answer in self.answers)
        loops = sum(is_looping(answer.text) for answer in self.answers)
        return {
            "prompts": len(texts),
            "completions": len(self.answers),
            "equal_answers": equal_share(list(texts.values())),
            "looping_answers": loops / len(self.answers),
            **numbers,
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Evaluation":
        """Read back an evaluation from the result of `dataclasses.asdict`."""
        accuracy, calibration = saved["accuracy"], saved.get("calibration")
        if calibration is not None:
            overconfidence = Interval(**calibration["overconfidence"])
            calibration = Calibration(**{**calibration, "overconfidence": overconfidence})
        # Not validated by pydantic: a task may give whole numbers as rewards, which would become
        # floats, and a resumed run would write other bytes than one that was never interrupted.
        fields = {
            "accuracy": None if accuracy is None else Interval(**accuracy),
            "answers": [GradedCompletion(**answer) for answer in saved["answers"]],
            "by_domain": {
                domain: Interval(**interval) for domain, interval in saved["by_domain"].items()
            },
            "traces": [read_trace(saved_trace) for saved_trace in saved.get("traces", [])],
            "calibration": calibration,
        }
        return cls(**{**saved, **fields})


def evaluate(
    client: SamplingClient,
    renderer: Renderer,
    task: Task,
    teacher: Teacher | None,
    settings: EvaluationSettings,
) -> Evaluation:
    """Sample and verify completions, and compare student and teacher on the student's tokens."""
    rollouts = answer_heldout(client, renderer, task, settings, rescored=teacher is not None)
    return examine_answers(rollouts, client, renderer, teacher, settings)


def answer_heldout(
    client: SamplingClient,
    renderer: Renderer,
    task: Task,
    settings: EvaluationSettings,
    notes: Mapping[str, Note] | None = None,
    *,
    rescored: bool = False,
) -> list[Rollout]:
    """Sample completions of the held-out prompts, with their rewards and notes.

    If `rescored`, the same client scores them next.
    """
    sampling = replace(settings.sampling, rescored=rescored)
    rollouts = sample_rollouts(
        settings.batch, client, renderer, sampling, as_environment(task, renderer)
    )
    # No step trains on them, so their notes are those of step 0 in every evaluation.
    return add_notes(add_rewards(rollouts, task), notes or {}, NoteMoment(0, client))


def examine_answers(
    rollouts: list[Rollout],
    client: SamplingClient,
    renderer: Renderer,
    teacher: Teacher | None,
    settings: EvaluationSettings,
) -> Evaluation:
    """Return the evaluation of held-out completions, compared with the teacher if there is one."""
    comparison = _TeacherComparison()
    if teacher is not None:
        comparison = _compare_with_teacher(client, teacher, rollouts, renderer)
    return _build_evaluation(rollouts, comparison, settings.seed)


def evaluate_teacher(
    teacher: Teacher, renderer: Renderer, task: Task, settings: EvaluationSettings
) -> Evaluation | None:
    """Evaluate the teacher's answers in its own context. Returns None if it cannot generate."""
    rollouts = sample_teacher_rollouts(
        settings.batch, teacher, renderer, settings.sampling, as_environment(task, renderer)
    )
    if rollouts is None:
        return None
    return _build_evaluation(add_rewards(rollouts, task), _TeacherComparison(), settings.seed)


def show_notes_of(
    settings: EvaluationSettings, rollouts: Sequence[Rollout], names: Collection[str]
) -> EvaluationSettings | None:
    """Return the settings with the notes of each prompt's first completion in the prompt.

    A teacher that shows notes then has a context before it answers. None if one lacks a note.
    """
    first = {rollout.prompt.id: rollout for rollout in reversed(rollouts)}
    if any(not set(names) <= rollout.notes.keys() for rollout in first.values()):
        return None
    prompts = [
        replace(prompt, privileged={**prompt.privileged, **_pick(first[prompt.id].notes, names)})
        for prompt in settings.prompts
    ]
    return replace(settings, prompts=prompts)


def _pick(notes: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    return {name: notes[name] for name in names}


def compare_accuracy(before: Evaluation, after: Evaluation, seed: int) -> Interval | None:
    """Return the gain in accuracy with its interval, paired by prompt: see `difference`.

    Returns None if the task gives no rewards.
    """
    if not before.scores or not after.scores:
        return None
    return difference(after.scores, before.scores, seed)


def compute_confidences(answers: Sequence[GradedCompletion]) -> dict[str, tuple[float, float]]:
    """Return for each prompt the confidence in [0, 1], and 1.0 if the answer is right, else 0.0.

    Prompts without a reward are left out. With several answers to every prompt, the confidence is
    the share of the commonest answer, which is then right or wrong. With one answer, it is the
    probability of the whole text under the model that wrote it. A calibrated model gets that right
    if only one text is right; it says little about long answers.
    """
    groups: dict[str, list[GradedCompletion]] = {}
    for answer in answers:
        if answer.reward is not None:
            groups.setdefault(answer.prompt, []).append(answer)
    has_several = has_several_answers(answers)
    pairs: dict[str, tuple[float, float]] = {}
    for prompt, group in groups.items():
        first, is_right = group[0], [(answer.reward or 0.0) >= 1.0 for answer in group]
        if has_several:
            pairs[prompt] = majority_agreement([answer.text.strip() for answer in group], is_right)
        elif first.logprob is not None:
            # The log-probability is a mean over tokens; rounding can lift the sum above 0.
            confidence = math.exp(min(first.logprob * first.tokens, 0.0))
            pairs[prompt] = confidence, float(is_right[0])
    return pairs


def has_several_answers(answers: Sequence[GradedCompletion]) -> bool:
    """Return True if every prompt with rewards has several answers."""
    counts = Counter(answer.prompt for answer in answers if answer.reward is not None)
    return min(counts.values(), default=0) > 1


def compare_overconfidence(before: Evaluation, after: Evaluation, seed: int) -> Interval | None:
    """Return the growth of overconfidence with its interval, paired by prompt.

    Returns None if no prompt has a confidence in both evaluations.
    """
    old, new = (
        {
            prompt: confidence - is_right
            for prompt, (confidence, is_right) in compute_confidences(evaluation.answers).items()
        }
        for evaluation in (before, after)
    )
    shared = [prompt for prompt in old if prompt in new]
    if not shared:
        return None
    return difference([new[prompt] for prompt in shared], [old[prompt] for prompt in shared], seed)


@dataclass(frozen=True, slots=True)
class _TeacherComparison:
    """The mean student entropy and reverse KL per token, and the traced answers."""

    entropy: float | None = None
    divergence: float | None = None
    traces: list[TokenTrace] = field(default_factory=list)


def _build_evaluation(
    rollouts: list[Rollout], comparison: _TeacherComparison, seed: int
) -> Evaluation:
    by_prompt: dict[str, list[float]] = {}
    for rollout in rollouts:
        if rollout.reward is not None:
            by_prompt.setdefault(rollout.prompt.id, []).append(rollout.reward)
    count = len(rollouts)
    answers = [
        GradedCompletion(
            rollout.prompt.id,
            rollout.prompt.messages[-1].content,
            rollout.prompt.answer,
            rollout.text,
            rollout.reward,
            int(rollout.loss_mask.sum()),
            _compute_mean(rollout.policy_logprobs[rollout.loss_mask]),
            [call.outcome for turn in rollout.turns for call in turn.calls],
        )
        for rollout in rollouts
    ]
    return Evaluation(
        answers=answers,
        scores=[sum(rewards) / len(rewards) for rewards in by_prompt.values()],
        accuracy=_estimate_accuracy(list(by_prompt.values()), seed) if by_prompt else None,
        length=sum(len(rollout.tokens) for rollout in rollouts) / count,
        truncated=sum(rollout.stop_reason == "length" for rollout in rollouts) / count,
        student_entropy=comparison.entropy,
        reverse_kl=comparison.divergence,
        by_domain=_split_by_domain(rollouts, by_prompt, seed),
        traces=comparison.traces,
        calibration=_measure_calibration(answers, seed),
    )


def _measure_calibration(answers: Sequence[GradedCompletion], seed: int) -> Calibration | None:
    pairs = list(compute_confidences(answers).values())
    if not pairs:
        return None
    confidence, is_right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return Calibration(
        confidence=sum(confidence) / len(confidence),
        overconfidence=difference(confidence, is_right, seed),
        error=calibration_error(confidence, is_right),
    )


def _compute_mean(logprobs: Tensor) -> float | None:
    """Return the mean, or None if there are no log-probabilities or one is NaN."""
    mean = logprobs.double().mean().item() if len(logprobs) else math.nan
    return mean if math.isfinite(mean) else None


def _split_by_domain(
    rollouts: Sequence[Rollout], by_prompt: Mapping[str, Sequence[float]], seed: int
) -> dict[str, Interval]:
    """Return the accuracy on each domain, in the order in which the prompts name domains."""
    domains: dict[str, dict[str, Sequence[float]]] = {}
    for rollout in rollouts:
        prompt = rollout.prompt
        if prompt.domain is not None and prompt.id in by_prompt:
            domains.setdefault(prompt.domain, {})[prompt.id] = by_prompt[prompt.id]
    return {
        domain: _estimate_accuracy(list(rewards.values()), seed)
        for domain, rewards in domains.items()
    }


def _estimate_accuracy(rewards: Sequence[Sequence[float]], seed: int) -> Interval:
    """Return the mean reward of a prompt with its interval, see `mean_score`."""
    return mean_score([sum(of_prompt) / len(of_prompt) for of_prompt in rewards], seed)


@torch.no_grad()
def _compare_with_teacher(
    client: SamplingClient, teacher: Teacher, rollouts: Sequence[Rollout], renderer: Renderer
) -> _TeacherComparison:
    """Compare student and teacher by full distributions, or else by the sampled tokens alone."""
    requests = build_score_requests(rollouts, reuse=True)
    # Both sides must give distributions: a service may offer the student's sampled tokens alone.
    full = "full" in teacher.capabilities.signals and "full" in client.capabilities.signals
    signal = Full() if full else Sampled()
    student_signals = client.score(requests, signal)
    teacher_signals = teacher.score(rollouts, signal)
    divergences, entropies = _compare_all_tokens(
        rollouts, student_signals, teacher_signals, full=full
    )
    signals = list(zip(student_signals, teacher_signals, strict=True))
    traced = choose_traced(rollouts)
    traces = [trace(rollouts[index], *signals[index], renderer) for index in traced]
    # Many signals share one head, whose weights may be loaded for this comparison alone.
    heads = {head.key: head for _, teacher_signal in signals for head in teacher_signal.heads}
    for head in heads.values():
        head.release()
    return _TeacherComparison(
        entropy=entropies.mean().item() if len(entropies) else None,
        divergence=divergences.mean().item() if len(divergences) else None,
        traces=traces,
    )


def _compare_all_tokens(
    rollouts: Sequence[Rollout],
    student_signals: Sequence[TeacherSignal],
    teacher_signals: Sequence[TeacherSignal],
    *,
    full: bool,
) -> tuple[Tensor, Tensor]:
    """Return the divergence at the supervised tokens that the teacher knows, and the student's
    entropy at all of them; by full distributions if both sides have them.
    """
    divergences, entropies = ([torch.zeros(0, dtype=torch.float64)] for _ in range(2))
    datums = list(map(Datum, rollouts, teacher_signals, student_signals))
    with show_wait("comparisons with the teacher", len(rollouts)) as wait:
        # Together, because a head's product of the few tokens of one answer is many times slower.
        for (rows,) in group_rows_into_passes(datums, COMPARED_TEXTS_TOKENS, sys.maxsize):
            part = [rollouts[row] for row in rows]
            student, teacher = (
                pack_signals([signals[row] for row in rows], part)
                for signals in (student_signals, teacher_signals)
            )
            tokens = torch.cat([rollout.tokens[rollout.loss_mask] for rollout in part])
            divergence, entropy = (
                _compare_distributions(student, teacher, tokens)
                if full
                else _compare_sampled_tokens(student, teacher)
            )
            if divergence is not None:
                unknown = teacher.unknown_tokens
                known_tokens = slice(None) if unknown is None else ~unknown.cpu()
                divergences.append(divergence.double().cpu()[known_tokens])
            entropies.append(entropy.double().cpu())
            wait.advance(len(rows))
    return torch.cat(divergences), torch.cat(entropies)


def _compare_distributions(
    student_signal: TeacherSignal, teacher_signal: TeacherSignal, tokens: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Return reverse KL (None if the teacher's signal is empty) and student entropy, each [T]."""
    compared = compare_signals(
        (student_signal, teacher_signal), tokens, COMPARED_TOKENS, ("reverse_kl", "student_entropy")
    )
    assert compared.student_entropy is not None, "the student's own client gives its hidden states"
    return compared.reverse_kl, compared.student_entropy


def _compare_sampled_tokens(
    student_signal: TeacherSignal, teacher_signal: TeacherSignal
) -> tuple[Tensor | None, Tensor]:
    """Return one-sample estimates of the same two, [T], from the sampled tokens."""
    assert student_signal.logprobs is not None, "the student's own client was asked for them"
    logprobs = read_tokens(teacher_signal, slice(None)).logprobs
    divergence = None if logprobs is None else F.k1(student_signal.logprobs, logprobs)
    return divergence, -student_signal.logprobs
