"""One step, and the loop over it. Every method is a configuration of these seven calls."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

import torch

from practicum.core.faults import fault
from practicum.core.randomness import seed_of
from practicum.costs import Ledger
from practicum.errors import NumericError, TeacherError
from practicum.objective import Objective, Signal
from practicum.ports import AdamParams, SamplingClient, Task, Teacher, TrainingClient
from practicum.rollouts import (
    RolloutArchive,
    RolloutBatch,
    RolloutWriters,
    Source,
    add_rewards,
    as_environment,
    collect_rollouts,
    select_prompts,
)
from practicum.text import Renderer
from practicum.training.candidates import attach_candidates
from practicum.types import (
    FAILURES,
    Datum,
    ForwardResult,
    Metrics,
    Prompt,
    Rollout,
    SamplingParams,
    StatesLike,
    TeacherSignal,
    TokenRecord,
)

LOGPROB_TOLERANCE = 1e-3
"""A teacher's log-probability above this is not rounding any more."""

ROLLOUT_SOURCES = ("student", "teacher", "dataset")
"""Who can have written the tokens that are learned from."""

EVENTS = frozenset({"nonfinite", "skipped", "empty_updates", "halvings"})
"""The metrics of an update that count what happened in it."""

SIZES = frozenset({"tokens", "supervised"})
"""The metrics of an update that count its data; the same in every epoch but for what the weights leave out."""

SKIPS_ALLOWED, SKIPS_WINDOW = 2, 20
"""More than this many skipped updates within the window end the run."""


@dataclass(frozen=True, slots=True)
class StepComponents:
    """What a step is made of: who learns, who teaches, who is held near to, and on what; `ledger` counts what they do.

    `sampler` draws with the student's weights as they are at each call.
    """

    student: TrainingClient
    sampler: SamplingClient
    teacher: Teacher
    task: Task
    renderer: Renderer
    prompts: Sequence[Prompt]
    reference: Teacher | None = None
    archive: RolloutArchive = field(default_factory=RolloutArchive)
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def teachers(self) -> tuple[Teacher, ...]:
        """The teacher, and the reference where there is one."""
        return (self.teacher,) if self.reference is None else (self.teacher, self.reference)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What may change from step to step: the objective, how completions are drawn, how fast to learn."""

    objective: Objective
    n: int
    sampling: SamplingParams
    source: Source
    adam: AdamParams


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The numbers of a step: how many prompts, and the plan of each step (counted from 1).

    The data are split into so many `updates`, and learned from in so many `epochs`.
    """

    seed: int
    prompts_per_step: int
    plan: Callable[[int], StepPlan]
    updates: int = 1
    epochs: int = 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step did."""

    step: int
    rollouts: list[Rollout]
    outputs: TokenRecord
    metrics: Metrics


def train_step(step: int, parts: StepComponents, settings: StepSettings) -> StepResult:
    """Sample, reward, score, assemble, differentiate, update: one step of on-policy distillation."""
    clock = PhaseTimer()
    now = settings.plan(step)
    rollouts = generate_rollouts(step, now, parts, settings, parts.sampler, version=step - 1)
    clock.end_phase("sample")
    data = score_rollouts(rollouts, now.objective, parts)
    clock.end_phase("score")
    return update_student(step, data, now, parts, settings, clock)


def generate_rollouts(
    step: int,
    now: StepPlan,
    parts: StepComponents,
    settings: StepSettings,
    client: SamplingClient,
    version: int,
) -> list[Rollout]:
    """Sample and reward: the rollouts of a step, by a client with the student's weights after `version` steps.

    They bring the client's candidates where a teacher has to be told them.
    """
    prompts = select_prompts(parts.prompts, settings.seed, step, settings.prompts_per_step)
    batch = RolloutBatch(prompts, now.n, settings.seed, step, version=version)
    authors = RolloutWriters(
        client, parts.teacher, parts.renderer, parts.archive, as_environment(parts.task)
    )
    rollouts = add_rewards(collect_rollouts(batch, now.source, authors, now.sampling), parts.task)
    rollouts = attach_candidates(
        client, build_teacher_queries(now.objective, parts).values(), rollouts
    )
    fault("rollout")
    return rollouts


def score_rollouts(
    rollouts: Sequence[Rollout],
    objective: Objective,
    parts: StepComponents,
    said: Mapping[str, Sequence[TeacherSignal]] | None = None,
) -> list[Datum]:
    """Score and assemble: the rollouts with what teacher and reference say; what they `said` before is not asked again."""
    asked = {
        role: score_with(teacher, rollouts, signal)
        for role, (teacher, signal) in build_teacher_queries(objective, parts).items()
        if role not in (said or {})
    }
    answers = {**asked, **(said or {})}
    data = assemble(rollouts, answers["teacher"], answers["reference"])
    fault("score")
    return data


def build_teacher_queries(
    objective: Objective, parts: StepComponents
) -> dict[str, tuple[Teacher | None, Signal | None]]:
    """Who is asked what, by role."""
    return {
        "teacher": (parts.teacher, objective.signal),
        "reference": (parts.reference, objective.reference_signal),
    }


def update_student(
    step: int,
    data: Sequence[Datum],
    now: StepPlan,
    parts: StepComponents,
    settings: StepSettings,
    clock: "PhaseTimer",
) -> StepResult:
    """Differentiate and update, and tell whoever follows the student; what the step did and cost."""
    result = learn(parts.student, data, now, settings, step)
    for teacher in parts.teachers:
        teacher.after_step(step, data)
    clock.end_phase("update")
    fault("update")
    rollouts = [datum.rollout for datum in data]
    metrics = {
        **rollout_metrics(rollouts, result.supervised, step),
        **result.metrics,
        **clock.laps,
        **parts.ledger.take_bytes(),
        **parts.ledger.take(),
    }
    return StepResult(step, rollouts, result.outputs, metrics)


Step = Callable[[int, StepComponents, StepSettings], StepResult]
"""Does the step of a number, as `train_step` does."""


def train(
    first: int, last: int, parts: StepComponents, settings: StepSettings, do: Step = train_step
) -> Iterator[StepResult]:
    """Steps `first` to `last`, both included; NumericError when too many updates had to be skipped."""
    skipped: list[int] = []
    for step in range(first, last + 1):
        result = do(step, parts, settings)
        if result.metrics.get("skipped") or result.metrics.get("nonfinite"):
            skipped = [earlier for earlier in skipped if earlier > step - SKIPS_WINDOW] + [step]
        yield result
        if len(skipped) > SKIPS_ALLOWED:
            raise NumericError(
                f"the update was skipped {len(skipped)} times in {SKIPS_WINDOW} steps (steps {skipped}) because losses or "
                "gradients were not finite; lower optimizer.learning_rate, or look at the rollouts of those steps"
            )


def score_with(
    teacher: Teacher | None, rollouts: Sequence[Rollout], signal: Signal | None
) -> list[TeacherSignal]:
    """What a teacher says about the rollouts; silence where there is no teacher or no term of the objective asks it."""
    if teacher is None or signal is None:
        return [TeacherSignal() for _ in rollouts]
    return teacher.score(rollouts, signal)


def learn(
    student: TrainingClient, data: Sequence[Datum], now: StepPlan, settings: StepSettings, step: int
) -> ForwardResult:
    """Differentiate the objective and step the optimizer for each part of the data, in each epoch.

    Returns means over all updates; the outputs and the tokens that counted are those of the first epoch, whose states the
    student visited.
    """
    parts = split_data(data, settings.updates)
    epochs = []
    for epoch in range(settings.epochs):
        results = []
        for number, part in enumerate(parts, start=epoch * len(parts)):
            result = student.forward_backward(
                part, now.objective, seed_of(settings.seed, "update", step, number)
            )
            results.append(replace(result, metrics=result.metrics | student.optim_step(now.adam)))
        epochs.append(merge_parts(results))
    return replace(epochs[0], metrics=merge_metrics([epoch.metrics for epoch in epochs], EVENTS))


def split_data(data: Sequence[Datum], updates: int) -> list[Sequence[Datum]]:
    """Split the data into as many parts as there are updates, as equal as they get without splitting a prompt's completions."""
    prompts = list(dict.fromkeys(datum.rollout.prompt.id for datum in data))
    part = {prompt: place * updates // len(prompts) for place, prompt in enumerate(prompts)}
    parts: list[list[Datum]] = [[] for _ in range(updates)]
    for datum in data:
        parts[part[datum.rollout.prompt.id]].append(datum)
    return [part for part in parts if part]


def merge_parts(results: Sequence[ForwardResult]) -> ForwardResult:
    """Return the updates of an epoch as one, with their outputs in order."""
    return ForwardResult(
        merge_metrics([result.metrics for result in results], EVENTS | SIZES),
        outputs=TokenRecord.join([result.outputs for result in results]),
        supervised=[count for result in results for count in result.supervised],
    )


def merge_metrics(rows: Sequence[Metrics], totals: Collection[str]) -> Metrics:
    """Sum the metrics that are totals, and average the others over the rows that have them."""
    if len(rows) == 1:
        return rows[0]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row[name] for row in rows if name in row] for name in names}
    return {
        name: sum(values) if name in totals else sum(values) / len(values)
        for name, values in columns.items()
    }


def assemble(
    rollouts: Sequence[Rollout],
    signals: Sequence[TeacherSignal],
    references: Sequence[TeacherSignal] = (),
) -> list[Datum]:
    """Pair rollouts with signals; TeacherError where a signal cannot be about its rollout."""
    if len(signals) != len(rollouts):
        raise TeacherError(
            f"the teacher answered {len(signals)} of {len(rollouts)} rollouts; every rollout needs an answer"
        )
    for rollout, signal in zip(rollouts, signals, strict=True):
        for name in ("logprobs", "topk_logprobs", "hidden"):
            _check_signal(rollout, name, getattr(signal, name))
    silence = [TeacherSignal() for _ in rollouts]
    return [
        Datum(rollout, signal, reference)
        for rollout, signal, reference in zip(rollouts, signals, references or silence, strict=True)
    ]


def _check_signal(rollout: Rollout, name: str, values: torch.Tensor | StatesLike | None) -> None:
    if values is None:
        return
    where = f"the teacher's {name} for completion {rollout.sample} of prompt {rollout.prompt.id!r}"
    if len(values) != len(rollout.tokens):
        raise TeacherError(
            f"{where} cover {len(values)} tokens instead of {len(rollout.tokens)}; score exactly the given tokens"
        )
    if torch.isnan(values).any() if isinstance(values, torch.Tensor) else not values.finite:
        raise TeacherError(f"{where} hold NaN; the teacher's weights or its server are broken")
    if name != "hidden" and isinstance(values, torch.Tensor) and (values > LOGPROB_TOLERANCE).any():
        raise TeacherError(
            f"{where} reach {values.max().item():.3g}, above 0, so they are not log-probabilities"
        )


def rollout_metrics(rollouts: Sequence[Rollout], supervised: Sequence[int], step: int) -> Metrics:
    """Describe the rollouts of a step: who wrote them, how many updates ago, how long they are, how they ended, their mean reward.

    `supervised` counts the tokens of each rollout that the loss counts.
    """
    count = len(rollouts)
    run_updates = {
        rollout.prompt.id for rollout, tokens in zip(rollouts, supervised, strict=True) if tokens
    }
    metrics = {
        **{
            f"from_{source}": sum(rollout.source == source for rollout in rollouts) / count
            for source in ROLLOUT_SOURCES
        },
        "staleness": sum(step - 1 - rollout.policy_version for rollout in rollouts) / count,
        "unsupervised_prompts": float(
            len({rollout.prompt.id for rollout in rollouts} - run_updates)
        ),
        "rollouts": float(count),
        "length": sum(len(rollout.tokens) for rollout in rollouts) / count,
        "truncated": sum(rollout.stop_reason == "length" for rollout in rollouts) / count,
        "empty": sum(not rollout.text.strip() for rollout in rollouts) / count,
    }
    if any(rollout.turns for rollout in rollouts):
        metrics["failed"] = sum(rollout.stop_reason in FAILURES for rollout in rollouts) / count
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return metrics | ({"reward": sum(rewards) / len(rewards)} if rewards else {})


class PhaseTimer:
    """Seconds of each phase, by a clock that only goes forward."""

    def __init__(self) -> None:
        self.laps: Metrics = {}
        self._last = monotonic()

    def end_phase(self, phase: str) -> None:
        """The phase ends here."""
        now = monotonic()
        self.laps[f"seconds_{phase}"] = now - self._last
        self._last = now
