"""One step, and the loop over it. Every method is a configuration of these seven calls."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

import torch

from practicum.errors import NumericError, TeacherError
from practicum.faults import fault
from practicum.objective import Objective
from practicum.ports import AdamParams, Task, Teacher, TrainingClient
from practicum.randomness import seed_of
from practicum.rollouts import Batch, prompts_of_step, rewarded, sample_rollouts
from practicum.text import Renderer
from practicum.types import Datum, Metrics, Prompt, Rollout, SamplingParams, TeacherSignal, TokenOutputs

HIGHEST_LOGPROB = 1e-3
"""A teacher's log-probability above this is not rounding any more."""

SKIPS_ALLOWED, SKIPS_WINDOW = 2, 20
"""More than this many skipped updates within the window end the run."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a step is made of: who learns, who teaches, on what, towards what."""

    student: TrainingClient
    teacher: Teacher
    task: Task
    renderer: Renderer
    prompts: Sequence[Prompt]
    objective: Objective


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The numbers of a step: how many completions of how many prompts, how sampled, how fast to learn."""

    seed: int
    prompts_per_step: int
    n: int
    sampling: SamplingParams
    adam: Callable[[int], AdamParams]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did."""

    step: int
    rollouts: list[Rollout]
    outputs: list[TokenOutputs]
    metrics: Metrics


def train_step(step: int, parts: Parts, settings: StepSettings) -> StepResult:
    """Sample, reward, score, assemble, differentiate, update: one step of on-policy distillation."""
    clock = _Clock()
    prompts = prompts_of_step(parts.prompts, settings.seed, step, settings.prompts_per_step)
    batch = Batch(prompts, settings.n, settings.seed, step)
    rollouts = sample_rollouts(batch, parts.student.sampling_client(), parts.renderer, settings.sampling)
    rollouts = rewarded(rollouts, parts.task)
    clock.lap("sample")
    fault("rollout")
    signals = parts.teacher.score(rollouts, parts.objective.signal)
    data = assemble(rollouts, signals)
    clock.lap("score")
    fault("score")
    result = parts.student.forward_backward(data, parts.objective, seed_of(settings.seed, "update", step))
    metrics = result.metrics | parts.student.optim_step(settings.adam(step))
    parts.teacher.after_step(step)
    clock.lap("update")
    fault("update")
    return StepResult(step, rollouts, result.outputs, {**rollout_metrics(rollouts), **metrics, **clock.laps})


def train(first: int, last: int, parts: Parts, settings: StepSettings) -> Iterator[StepResult]:
    """Steps `first` to `last`, both included; NumericError when too many updates had to be skipped."""
    skipped: list[int] = []
    for step in range(first, last + 1):
        result = train_step(step, parts, settings)
        if result.metrics.get("skipped") or result.metrics.get("nonfinite"):
            skipped = [earlier for earlier in skipped if earlier > step - SKIPS_WINDOW] + [step]
        yield result
        if len(skipped) > SKIPS_ALLOWED:
            raise NumericError(
                f"the update was skipped {len(skipped)} times in {SKIPS_WINDOW} steps (steps {skipped}) because losses or "
                "gradients were not finite; lower optimizer.learning_rate, or look at the rollouts of those steps"
            )


def assemble(rollouts: Sequence[Rollout], signals: Sequence[TeacherSignal]) -> list[Datum]:
    """Pair rollouts with signals; TeacherError where a signal cannot be about its rollout."""
    if len(signals) != len(rollouts):
        raise TeacherError(
            f"the teacher answered {len(signals)} of {len(rollouts)} rollouts; every rollout needs an answer"
        )
    for rollout, signal in zip(rollouts, signals, strict=True):
        for name in ("logprobs", "topk_logprobs", "hidden"):
            _check_signal(rollout, name, getattr(signal, name))
    return [Datum(rollout, signal) for rollout, signal in zip(rollouts, signals, strict=True)]


def _check_signal(rollout: Rollout, name: str, values: torch.Tensor | None) -> None:
    if values is None:
        return
    where = f"the teacher's {name} for completion {rollout.sample} of prompt {rollout.prompt.id!r}"
    if len(values) != len(rollout.tokens):
        raise TeacherError(
            f"{where} cover {len(values)} tokens instead of {len(rollout.tokens)}; score exactly the given tokens"
        )
    if torch.isnan(values).any():
        raise TeacherError(f"{where} hold NaN; the teacher's weights or its server are broken")
    if name != "hidden" and (values > HIGHEST_LOGPROB).any():
        raise TeacherError(f"{where} reach {values.max().item():.3g}, above 0, so they are not log-probabilities")


def rollout_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Length in tokens, share cut off by the limit, share stopped at once, and mean reward where there is one."""
    count = len(rollouts)
    metrics = {
        "rollouts": float(count),
        "length": sum(len(rollout.tokens) for rollout in rollouts) / count,
        "truncated": sum(rollout.stop_reason == "length" for rollout in rollouts) / count,
        "empty": sum(not rollout.text.strip() for rollout in rollouts) / count,
    }
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return metrics | ({"reward": sum(rewards) / len(rewards)} if rewards else {})


class _Clock:
    """Seconds of each phase, by a clock that only goes forward."""

    def __init__(self) -> None:
        self.laps: Metrics = {}
        self._last = monotonic()

    def lap(self, phase: str) -> None:
        now = monotonic()
        self.laps[f"seconds_{phase}"] = now - self._last
        self._last = now
