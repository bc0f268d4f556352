"""Evaluate a model on held-out prompts: rewards, distance to its teacher, intervals."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

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
    Estimate,
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
from practicum.training.forensics import TokenTrace, read_trace
from practicum.training.teacher_comparison import TeacherComparison, compare_with_teacher
from practicum.types import CallOutcome, Prompt, Rollout, SamplingParams


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
    `calibration` is None if no answer has a reward or a confidence. `reverse_kl` and
    `student_entropy` are exact, or None and estimated; see `TeacherComparison`.
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
    reverse_kl_estimate: Estimate | None = None
    student_entropy_estimate: Estimate | None = None

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
            **{
                name: None if saved[name] is None else Estimate(**saved[name])
                for name in ("reverse_kl_estimate", "student_entropy_estimate")
            },
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
    return examine_answers(rollouts, client, renderer, task, teacher, settings)


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
    task: Task,
    teacher: Teacher | None,
    settings: EvaluationSettings,
    notes: Mapping[str, Note] | None = None,
) -> Evaluation:
    """Return the evaluation of held-out completions, compared with the teacher if there is one.

    If the comparison is an estimate and the completions are not drawn from the student's whole
    distribution, the prompts are answered again at temperature 1 for it.
    """

    def draw_samples() -> list[Rollout]:
        unmodified = replace(settings.sampling, temperature=1.0, top_p=1.0, top_k=0)
        if settings.sampling == unmodified:
            return rollouts
        warm_settings = replace(settings, sampling=unmodified)
        return answer_heldout(client, renderer, task, warm_settings, notes, rescored=True)

    comparison = TeacherComparison()
    if teacher is not None:
        comparison = compare_with_teacher(client, teacher, rollouts, renderer, draw_samples)
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
    return _build_evaluation(add_rewards(rollouts, task), TeacherComparison(), settings.seed)


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


def _build_evaluation(
    rollouts: list[Rollout], comparison: TeacherComparison, seed: int
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
        reverse_kl_estimate=comparison.divergence_estimate,
        student_entropy_estimate=comparison.entropy_estimate,
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
