"""Evaluate a model on held-out prompts: rewards, distance to its teacher, intervals."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from practicum.pictures import is_picture
from practicum.ports import SamplingClient, Task, Teacher
from practicum.ports.notes import Note, NoteMoment
from practicum.rollouts import (
    HeldoutSearch,
    RolloutBatch,
    RolloutWriters,
    add_notes,
    add_rewards,
    as_environment,
    collect_rollouts,
    measure_drafts,
    sample_rollouts,
    sample_teacher_rollouts,
    score_drafts,
)
from practicum.statistics import (
    Interval,
    calibration_error,
    difference,
    mean_score,
)
from practicum.statistics.heldout import (
    Calibration,
    Evaluation,
    GradedCompletion,
    compute_confidences,
)
from practicum.text import Renderer
from practicum.training.teacher_comparison import TeacherComparison, compare_with_teacher
from practicum.types import Prompt, Rollout, SamplingParams


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """The held-out prompts, the number of completions of each, and the sampling parameters."""

    prompts: Sequence[Prompt]
    samples: int
    sampling: SamplingParams
    seed: int
    search: HeldoutSearch | None = None

    @property
    def batch(self) -> RolloutBatch:
        """Return the completions to sample, the same in every evaluation of a run."""
        return RolloutBatch(self.prompts, self.samples, self.seed, step=1, stream="evaluation")


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
    # No step trains on these rollouts, so every evaluation makes their notes as in step 0.
    return add_notes(add_rewards(rollouts, task), notes or {}, NoteMoment(0, client))


def evaluate_search(writers: RolloutWriters, settings: EvaluationSettings) -> Evaluation | None:
    """Evaluate the answer that the search chooses for each held-out prompt; None without a search.

    The random stream is the stream of plain completions. The source and its scorer see the prompts
    without answers and privileged fields, and the verifier only grades the chosen answers.
    """
    search, task = settings.search, writers.task
    if search is None or task is None:
        return None
    prompts = [
        replace(prompt, answer=None, response=None, reasoning=None, privileged={})
        for prompt in settings.prompts
    ]
    batch = replace(settings.batch, prompts=prompts, n=search.n)
    sampling = replace(settings.sampling, temperature=search.temperature)
    rollouts = collect_rollouts(batch, search.source, writers, sampling)
    # If all answers failed, none has a loss, and the first one counts.
    best = {rollout.prompt.id: rollout for rollout in reversed(rollouts)}
    best |= {rollout.prompt.id: rollout for rollout in rollouts if rollout.loss_mask.any()}
    answers = [replace(best[prompt.id], prompt=prompt, reward=None) for prompt in settings.prompts]
    return _build_evaluation(add_rewards(answers, task), TeacherComparison(), settings.seed)


def examine_answers(
    rollouts: list[Rollout],
    client: SamplingClient,
    renderer: Renderer,
    task: Task,
    teacher: Teacher | None,
    settings: EvaluationSettings,
    notes: Mapping[str, Note] | None = None,
) -> Evaluation:
    """Return the evaluation of held-out completions, with a comparison to the teacher if given.

    If the comparison is an estimate and the completions are not sampled from the student's full
    distribution, the prompts are answered again at temperature 1 for the comparison.
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

    A teacher that shows notes then has its context before it answers. None if a note is missing.
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
            list(dict.fromkeys(filter(is_picture, rollout.prompt_tokens))),
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
        drafts=measure_drafts(rollouts),
        draft_scores=score_drafts(rollouts),
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
