"""How good the student is on held-out prompts, and how far from its teacher, with intervals."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from practicum import functional as F
from practicum.objective import Full, Sampled, compare_signals, read_tokens
from practicum.ports import SamplingClient, Task, Teacher
from practicum.rollouts import (
    RolloutBatch,
    add_rewards,
    as_environment,
    sample_rollouts,
    sample_teacher_rollouts,
)
from practicum.statistics import (
    Interval,
    bootstrap,
    calibration_error,
    difference,
    majority_agreement,
    wilson,
)
from practicum.text import Renderer
from practicum.training.forensics import TokenTrace, choose_traced, read_trace, trace
from practicum.types import Prompt, Rollout, SamplingParams, ScoreRequest, TeacherSignal

CHUNK = 256


@dataclass(frozen=True, slots=True)
class EvaluationSettings:
    """Which prompts, how many completions of each, and how they are sampled."""

    prompts: Sequence[Prompt]
    samples: int
    sampling: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class GradedCompletion:
    """One held-out prompt with what was expected and what was said.

    `logprob` is the answer's mean log-probability a token under the model that wrote it, untempered.
    """

    prompt: str
    question: str
    expected: str | None
    text: str
    reward: float | None
    tokens: int = 0
    logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """How far confidence is earned: its mean, that less the share of right answers (over prompts), and the calibration error.

    The error is the expected one over bins of equally many prompts (see `practicum.statistics.calibration_error`); what
    confidence is, see `confidences`.
    """

    confidence: float
    overconfidence: Interval
    error: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result on every prompt; `scores` is each prompt's mean reward (empty where the task has no answers).

    `by_domain` is the accuracy on the prompts of each domain, where prompts have one; `traces` are the first few answers
    token by token; `calibration` is None where no answer has a verdict or a confidence.
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

    def summary(self) -> dict[str, Any]:
        """The numbers for `summary.json`, without the answers themselves."""
        numbers = asdict(self)
        del numbers["answers"], numbers["scores"], numbers["traces"]
        return {
            "prompts": len({answer.prompt for answer in self.answers}),
            "completions": len(self.answers),
            **numbers,
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Evaluation":
        """Read back what `dataclasses.asdict` gave."""
        accuracy = None if saved["accuracy"] is None else Interval(**saved["accuracy"])
        answers = [GradedCompletion(**answer) for answer in saved["answers"]]
        by_domain = {
            domain: Interval(**interval) for domain, interval in saved["by_domain"].items()
        }
        traces = [read_trace(one) for one in saved.get("traces", [])]
        sure = saved.get("calibration")
        if sure is not None:
            sure = Calibration(**{**sure, "overconfidence": Interval(**sure["overconfidence"])})
        read = {
            "accuracy": accuracy,
            "answers": answers,
            "by_domain": by_domain,
            "traces": traces,
            "calibration": sure,
        }
        return cls(**{**saved, **read})


def evaluate(
    client: SamplingClient,
    renderer: Renderer,
    task: Task,
    teacher: Teacher | None,
    settings: EvaluationSettings,
) -> Evaluation:
    """Sample, verify, and compare with the teacher on the states the student visits."""
    batch = RolloutBatch(
        settings.prompts, settings.samples, settings.seed, step=1, stream="evaluation"
    )
    rollouts = add_rewards(
        sample_rollouts(batch, client, renderer, settings.sampling, as_environment(task)), task
    )
    distance = (
        _TeacherComparison() if teacher is None else _distance(client, teacher, rollouts, renderer)
    )
    return _evaluation(rollouts, distance, settings.seed)


def evaluate_teacher(
    teacher: Teacher, renderer: Renderer, task: Task, settings: EvaluationSettings
) -> Evaluation | None:
    """The teacher's own answers in its own context, or None where it cannot generate."""
    batch = RolloutBatch(
        settings.prompts, settings.samples, settings.seed, step=1, stream="evaluation"
    )
    rollouts = sample_teacher_rollouts(
        batch, teacher, renderer, settings.sampling, as_environment(task)
    )
    if rollouts is None:
        return None
    return _evaluation(add_rewards(rollouts, task), _TeacherComparison(), settings.seed)


def gain(before: Evaluation, after: Evaluation, seed: int) -> Interval | None:
    """The paired difference of accuracy, with an interval by bootstrap over prompts."""
    if not before.scores or not after.scores:
        return None
    return difference(after.scores, before.scores, seed)


def confidences(answers: Sequence[GradedCompletion]) -> dict[str, tuple[float, float]]:
    """How sure the answer to each prompt was, between 0 and 1, and 1 where it is right, else 0; without a verdict, left out.

    With several answers to every prompt the confidence is the share that says the same as the commonest one, which is then right
    or wrong. With one it is the probability of its whole text under the model that wrote it, which a calibrated model has right
    where one text alone is right, and which says little of long answers.
    """
    groups: dict[str, list[GradedCompletion]] = {}
    for answer in answers:
        if answer.reward is not None:
            groups.setdefault(answer.prompt, []).append(answer)
    if agreeing(answers):
        return {
            prompt: majority_agreement(
                [one.text.strip() for one in group], [(one.reward or 0.0) >= 1.0 for one in group]
            )
            for prompt, group in groups.items()
        }
    return {
        prompt: (
            math.exp(min(group[0].logprob * group[0].tokens, 0.0)),
            float((group[0].reward or 0.0) >= 1.0),
        )
        for prompt, group in groups.items()
        if group[0].logprob is not None
    }


def agreeing(answers: Sequence[GradedCompletion]) -> bool:
    """Whether there are several answers to every prompt that has one with a verdict."""
    counts = Counter(answer.prompt for answer in answers if answer.reward is not None)
    return min(counts.values(), default=0) > 1


def surer(before: Evaluation, after: Evaluation, seed: int) -> Interval | None:
    """How much overconfidence grew, with an interval by bootstrap over prompts; None where confidences are not known."""
    old, new = (
        {prompt: sure - right for prompt, (sure, right) in confidences(evaluation.answers).items()}
        for evaluation in (before, after)
    )
    both = [prompt for prompt in old if prompt in new]
    return (
        difference([new[prompt] for prompt in both], [old[prompt] for prompt in both], seed)
        if both
        else None
    )


@dataclass(frozen=True, slots=True)
class _TeacherComparison:
    """Mean student entropy and reverse KL a token, and the traced answers; nothing where there is no teacher."""

    entropy: float | None = None
    divergence: float | None = None
    traces: list[TokenTrace] = field(default_factory=list)


def _evaluation(rollouts: list[Rollout], distance: _TeacherComparison, seed: int) -> Evaluation:
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
            _mean(rollout.policy_logprobs[rollout.loss_mask]),
        )
        for rollout in rollouts
    ]
    return Evaluation(
        answers=answers,
        scores=[sum(rewards) / len(rewards) for rewards in by_prompt.values()],
        accuracy=_interval(list(by_prompt.values()), seed) if by_prompt else None,
        length=sum(len(rollout.tokens) for rollout in rollouts) / count,
        truncated=sum(rollout.stop_reason == "length" for rollout in rollouts) / count,
        student_entropy=distance.entropy,
        reverse_kl=distance.divergence,
        by_domain=_by_domain(rollouts, by_prompt, seed),
        traces=distance.traces,
        calibration=_calibration(answers, seed),
    )


def _calibration(answers: Sequence[GradedCompletion], seed: int) -> Calibration | None:
    pairs = list(confidences(answers).values())
    if not pairs:
        return None
    sure, right = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return Calibration(
        sum(sure) / len(sure), difference(sure, right, seed), calibration_error(sure, right)
    )


def _mean(logprobs: Tensor) -> float | None:
    """Their mean; None where there are none, or one is not known."""
    mean = logprobs.double().mean().item() if len(logprobs) else math.nan
    return mean if math.isfinite(mean) else None


def _by_domain(
    rollouts: Sequence[Rollout], by_prompt: Mapping[str, Sequence[float]], seed: int
) -> dict[str, Interval]:
    """The accuracy on each domain, in the order in which the prompts name them."""
    domains: dict[str, dict[str, Sequence[float]]] = {}
    for rollout in rollouts:
        if rollout.prompt.domain is not None and rollout.prompt.id in by_prompt:
            domains.setdefault(rollout.prompt.domain, {})[rollout.prompt.id] = by_prompt[
                rollout.prompt.id
            ]
    return {domain: _interval(list(rewards.values()), seed) for domain, rewards in domains.items()}


def _interval(rewards: Sequence[Sequence[float]], seed: int) -> Interval:
    """Wilson's interval for one yes-or-no answer a prompt, else a bootstrap over prompts."""
    scores = [sum(of_prompt) / len(of_prompt) for of_prompt in rewards]
    if max(map(len, rewards)) == 1 and set(scores) <= {0.0, 1.0}:
        return wilson(sum(scores), len(scores))
    return bootstrap(torch.tensor(scores, dtype=torch.float64), seed)


@torch.no_grad()
def _distance(
    client: SamplingClient, teacher: Teacher, rollouts: Sequence[Rollout], renderer: Renderer
) -> _TeacherComparison:
    """How far the student is from its teacher; by the sampled tokens alone where the teacher gives no more."""
    requests = [
        ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist())) for rollout in rollouts
    ]
    full = "full" in teacher.capabilities.signals and "full" in client.capabilities.signals
    signal = Full() if full else Sampled()
    student_signals, theirs = client.score(requests, signal), teacher.score(rollouts, signal)
    divergences, entropies = [], []
    for rollout, own, other in zip(rollouts, student_signals, theirs, strict=True):
        divergence, entropy = (
            _by_distributions(own, other, rollout.tokens)
            if full
            else _compare_sampled_tokens(own, other)
        )
        divergences += [] if divergence is None else [divergence.double().cpu()[rollout.loss_mask]]
        entropies.append(entropy.double().cpu()[rollout.loss_mask])
    traces = [
        trace(rollouts[place], student_signals[place], theirs[place], renderer)
        for place in choose_traced(rollouts)
    ]
    for head in {head.key: head for other in theirs for head in other.heads}.values():
        head.release()
    distance = torch.cat(divergences).mean().item() if divergences else None
    return _TeacherComparison(torch.cat(entropies).mean().item(), distance, traces)


def _by_distributions(
    own: TeacherSignal, other: TeacherSignal, tokens: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Reverse KL, where the teacher is not silent, and the student's entropy."""
    compared = compare_signals((own, other), tokens, CHUNK, ("reverse_kl", "student_entropy"))
    assert compared.student_entropy is not None, "the student's own client gives its hidden states"
    return compared.reverse_kl, compared.student_entropy


def _compare_sampled_tokens(
    own: TeacherSignal, other: TeacherSignal
) -> tuple[Tensor | None, Tensor]:
    assert own.logprobs is not None, "the student's own client was asked for them"
    teacher = read_tokens(other, slice(None)).logprobs
    return None if teacher is None else F.k1(own.logprobs, teacher), -own.logprobs
