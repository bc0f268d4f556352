"""A training step and the training loop. Every method is a configuration of these calls."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

import torch

from practicum.core.faults import inject_fault
from practicum.core.randomness import seed_of
from practicum.costs import Ledger
from practicum.errors import NumericError, TeacherError
from practicum.objective import Objective, Signal
from practicum.ports import AdamParams, SamplingClient, StepFollower, Task, Teacher, TrainingClient
from practicum.ports.gate import (
    call_foreign,
    call_part,
    measure_rejections,
    report_rejections,
)
from practicum.ports.notes import Note, NoteMoment
from practicum.ports.scoring import Scorer, list_followers, name_role
from practicum.rollouts import (
    RolloutArchive,
    RolloutBatch,
    RolloutWriters,
    Segments,
    SourceConfig,
    Traffic,
    add_notes,
    add_rewards,
    as_environment,
    collect_rollouts,
    is_replay,
    measure_conversations,
    measure_drafts,
    measure_notes,
    select_prompts,
)
from practicum.text import Renderer
from practicum.training.candidates import attach_candidates
from practicum.training.curriculum import Curriculum
from practicum.training.judging import add_judgements, fit_scorers
from practicum.training.observing import accumulate_gradient, add_contexts
from practicum.types import (
    FAILURES,
    Datum,
    ForwardResult,
    Judgement,
    Metrics,
    Prompt,
    Rollout,
    SamplingParams,
    StatesLike,
    StepResult,
    TeacherSignal,
    TokenRecord,
)

LOGPROB_TOLERANCE = 1e-3
"""A teacher's log-probability above this is an error, not rounding."""

ROLLOUT_SOURCES = ("student", "teacher", "dataset")
"""The writers that have a share in every step's metrics; a reference is reported only if it writes."""

EVENTS = frozenset({"nonfinite", "skipped", "empty_updates", "halvings"})
"""The metrics of an update that count events: they are summed over updates and epochs."""

SIZES = frozenset({"tokens", "supervised", "context_tokens", "observed_tokens"})
"""The metrics of an update that count its tokens: they are summed over an epoch."""

SKIPS_ALLOWED, SKIPS_WINDOW = 2, 20
"""More skipped updates than this, within a window of this many steps, end the run."""


@dataclass(frozen=True, slots=True)
class StepComponents:
    """The components of a training step: student, teacher, reference model, task and prompts.

    `sampler` samples with the student's weights at the time of each call. `scorers` judge the
    rollouts in addition to the task's verifier, and `notes` are written about them. `traffic` has
    the turns of users, `segments` the answers that continue in a later step, and `curriculum`
    chooses among the prompts. `ledger` counts tokens, FLOPs and bytes.
    """

    student: TrainingClient
    sampler: SamplingClient
    teacher: Teacher
    task: Task
    renderer: Renderer
    prompts: Sequence[Prompt]
    reference: Teacher | None = None
    scorers: Mapping[str, Scorer] = field(default_factory=dict)
    notes: Mapping[str, Note] = field(default_factory=dict)
    archive: RolloutArchive = field(default_factory=RolloutArchive)
    traffic: Traffic | None = None
    segments: Segments | None = None
    curriculum: Curriculum | None = None
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def followers(self) -> dict[str, StepFollower]:
        """Return teacher, reference, scorers and notes by role."""
        return list_followers(self.teacher, self.reference, self.scorers, self.notes)

    def build_writers(self, client: SamplingClient) -> RolloutWriters:
        """Return the writers of rollouts, with the student that `client` samples from."""
        return RolloutWriters(
            client,
            self.teacher,
            self.renderer,
            self.archive,
            as_environment(self.task, self.renderer),
            self.reference,
            self.task,
            self.scorers,
            self.notes,
            self.traffic,
            self.segments,
        )


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The settings that may change from step to step: objective, sampling and optimizer."""

    objective: Objective
    n: int
    sampling: SamplingParams
    source: SourceConfig
    adam: AdamParams


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The settings of all steps; `plan` returns the settings of one step, counted from 1.

    A step splits its datums into `updates` mini-batches and trains on them for `epochs` epochs.
    """

    seed: int
    prompts_per_step: int
    plan: Callable[[int], StepPlan]
    updates: int = 1
    epochs: int = 1


def train_step(step: int, parts: StepComponents, settings: StepSettings) -> StepResult:
    """Run one step: sample, reward, note, judge, score, assemble, differentiate, update."""
    timer = PhaseTimer()
    plan = settings.plan(step)
    rollouts = generate_rollouts(step, plan, parts, settings, parts.sampler, version=step - 1)
    timer.end_phase("sample")
    datums = score_rollouts(rollouts, plan.objective, parts)
    timer.end_phase("score")
    return update_student(step, datums, plan, parts, settings, timer)


def generate_rollouts(
    step: int,
    plan: StepPlan,
    parts: StepComponents,
    settings: StepSettings,
    client: SamplingClient,
    version: int,
    lock: AbstractContextManager[object] | None = None,
) -> list[Rollout]:
    """Sample, reward and annotate a step's rollouts, with the student after `version` updates.

    The rollouts include the client's candidates if a teacher needs them. `lock` is held while notes
    are made, because notes may ask a teacher.
    """
    name = (settings.seed, step, settings.prompts_per_step)
    curriculum = parts.curriculum
    prompts = (
        curriculum.select(*name)
        if curriculum
        else select_prompts(parts.prompts, *name, in_order=parts.task.is_stream)
    )
    batch = RolloutBatch(prompts, plan.n, settings.seed, step, version=version)
    rollouts = collect_rollouts(batch, plan.source, parts.build_writers(client), plan.sampling)
    rollouts = add_rewards(rollouts, parts.task)
    # The source has already made its own note while sampling.
    notes = {n: note for n, note in parts.notes.items() if n != plan.source.note_made}
    with lock or nullcontext():
        rollouts = add_notes(rollouts, notes, NoteMoment(step, client))
    queries = build_teacher_queries(plan.objective, parts).values()
    rollouts = attach_candidates(client, queries, rollouts)
    inject_fault("rollout")
    return rollouts


def score_rollouts(
    rollouts: Sequence[Rollout],
    objective: Objective,
    parts: StepComponents,
    cached_signals: Mapping[str, Sequence[TeacherSignal]] | None = None,
    cached_judgements: Mapping[str, Sequence[Judgement]] | None = None,
) -> list[Datum]:
    """Judge the rollouts, score them with teacher and reference, and pair each with its signals.

    Roles in `cached_signals` and scorers in `cached_judgements` are not asked again.
    """
    rollouts = add_judgements(rollouts, parts.scorers, cached_judgements or {})
    signals = dict(cached_signals or {})
    for role, (teacher, signal) in build_teacher_queries(objective, parts).items():
        if role not in signals:
            signals[role] = score_with(teacher, rollouts, signal)
    datums = assemble(rollouts, signals["teacher"], signals["reference"])
    datums = add_contexts(datums, objective, parts.teacher)
    inject_fault("score")
    return datums


def build_teacher_queries(
    objective: Objective, parts: StepComponents
) -> dict[str, tuple[Teacher | None, Signal | None]]:
    """Return the teacher and the signal that the objective needs from it, by role."""
    return {
        "teacher": (parts.teacher, objective.signal),
        "reference": (parts.reference, objective.reference_signal),
    }


def update_student(
    step: int,
    datums: Sequence[Datum],
    plan: StepPlan,
    parts: StepComponents,
    settings: StepSettings,
    timer: "PhaseTimer",
) -> StepResult:
    """Run the updates of a step, notify teachers and scorers, and collect the step's metrics."""
    rollouts = [datum.rollout for datum in datums]
    result = run_updates(parts.student, datums, plan, settings, step, parts.scorers)
    with report_rejections() as rejections:
        judged = fit_scorers(parts.scorers, rollouts)
    for follower in parts.followers.values():
        follower.after_step(step, datums)
    if parts.curriculum is not None:
        parts.curriculum.observe(rollouts)
    timer.end_phase("update")
    inject_fault("update")
    metrics = {
        **measure_rollouts(rollouts, result.supervised, step, plan.source),
        **measure_notes(rollouts, parts.notes),
        **_measure_waiting(parts, rollouts, step, settings),
        **judged,
        **_measure_signals(plan.objective, rollouts, result.outputs),
        **measure_rejections(rollouts, rejections),
        **result.metrics,
        **timer.laps,
        **parts.ledger.take_bytes(),
        **parts.ledger.take(),
    }
    return StepResult(step, rollouts, result.outputs, metrics)


StepFunction = Callable[[int, StepComponents, StepSettings], StepResult]
"""The signature of `train_step`."""


def train(
    first: int,
    last: int,
    parts: StepComponents,
    settings: StepSettings,
    step_fn: StepFunction = train_step,
) -> Iterator[StepResult]:
    """Yield the results of steps `first` to `last`, both included.

    Raises NumericError when too many updates of the student, or of one scorer, had to be skipped.
    """
    skips: dict[str, list[int]] = {}
    for step in range(first, last + 1):
        result = step_fn(step, parts, settings)
        for part in _list_skipping(result.metrics, parts.scorers):
            recent = [earlier for earlier in skips.get(part, []) if earlier > step - SKIPS_WINDOW]
            skips[part] = [*recent, step]
        # The row of the last skipped step is written before the error ends the run.
        yield result
        for part, steps in skips.items():
            if len(steps) > SKIPS_ALLOWED:
                learner = "the update" if part == "optimizer" else f"the update of {part}"
                raise NumericError(
                    f"{learner} was skipped {len(steps)} times in {SKIPS_WINDOW} steps "
                    f"(steps {steps}) because losses or gradients were not finite; lower "
                    f"{part}.learning_rate, or check the rollouts of those steps"
                )


def _list_skipping(metrics: Metrics, scorers: Iterable[str]) -> list[str]:
    """Return the sections of a recipe with skipped updates in a step: `optimizer`, `scorers.NAME`."""
    skipping = ["optimizer"] if metrics.get("skipped") or metrics.get("nonfinite") else []
    return skipping + [
        f"scorers.{name}" for name in scorers if metrics.get(f"{name_role(name)}/skipped")
    ]


def score_with(
    teacher: Teacher | None, rollouts: Sequence[Rollout], signal: Signal | None
) -> list[TeacherSignal]:
    """Return a teacher's signals; empty signals without a teacher or if no loss term needs it."""
    if teacher is None or signal is None:
        return [TeacherSignal() for _ in rollouts]
    return teacher.score(rollouts, signal)


def run_updates(
    student: TrainingClient,
    datums: Sequence[Datum],
    plan: StepPlan,
    settings: StepSettings,
    step: int,
    scorers: Mapping[str, Scorer],
) -> ForwardResult:
    """Accumulate one gradient and run one `optim_step` for each mini-batch, in each epoch.

    Scorers may add their own gradients. Metrics are means over all updates, or sums if they are
    counts. Outputs and supervised tokens come from the first epoch.
    """
    batches = split_data(datums, settings.updates)
    epochs = []
    for epoch in range(settings.epochs):
        results = []
        for number, batch in enumerate(batches, start=epoch * len(batches)):
            result = accumulate_gradient(
                student, batch, plan.objective, seed_of(settings.seed, "update", step, number)
            )
            for name, scorer in scorers.items():
                add = partial(scorer.add_gradient, [datum.rollout for datum in batch])
                call_foreign(f"add_gradient() of scorer {name!r}", add)
            results.append(replace(result, metrics=result.metrics | student.optim_step(plan.adam)))
            inject_fault("mini_batch")
        epochs.append(merge_updates(results))
    # Only the first epoch sees the policy that sampled the rollouts, so its per-token numbers are
    # the on-policy ones.
    return replace(epochs[0], metrics=merge_metrics([epoch.metrics for epoch in epochs], EVENTS))


def split_data(datums: Sequence[Datum], updates: int) -> list[Sequence[Datum]]:
    """Split the datums into at most `updates` mini-batches with nearly equal numbers of prompts.

    All completions of a prompt stay in one mini-batch.
    """
    # Weights and baselines compare the completions of one prompt, so a prompt is never split.
    prompts = list(dict.fromkeys(datum.rollout.prompt.id for datum in datums))
    index_of = {prompt: place * updates // len(prompts) for place, prompt in enumerate(prompts)}
    batches: list[list[Datum]] = [[] for _ in range(updates)]
    for datum in datums:
        batches[index_of[datum.rollout.prompt.id]].append(datum)
    return [batch for batch in batches if batch]


def merge_updates(results: Sequence[ForwardResult]) -> ForwardResult:
    """Merge the results of an epoch's updates into one, with their outputs in order."""
    return ForwardResult(
        merge_metrics([result.metrics for result in results], EVENTS | SIZES),
        outputs=TokenRecord.join([result.outputs for result in results]),
        supervised=[count for result in results for count in result.supervised],
    )


def merge_metrics(rows: Sequence[Metrics], totals: Collection[str]) -> Metrics:
    """Sum the metrics in `totals`, and average all other metrics over the rows that have them."""
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
    """Pair rollouts with signals; TeacherError if a signal does not fit its rollout."""
    if len(signals) != len(rollouts):
        raise TeacherError(
            f"the teacher answered {len(signals)} of {len(rollouts)} rollouts; every rollout needs "
            "an answer"
        )
    for rollout, signal in zip(rollouts, signals, strict=True):
        _check_values(rollout, "logprobs", signal.logprobs)
        _check_values(rollout, "topk_logprobs", signal.topk_logprobs)
        _check_values(rollout, "hidden", signal.hidden)
    references = references or [TeacherSignal() for _ in rollouts]
    return [Datum(*pair) for pair in zip(rollouts, signals, references, strict=True)]


def _check_values(rollout: Rollout, name: str, values: torch.Tensor | StatesLike | None) -> None:
    if values is None:
        return
    where = f"the teacher's {name} for completion {rollout.sample} of prompt {rollout.prompt.id!r}"
    if len(values) != len(rollout.tokens):
        raise TeacherError(
            f"{where} cover {len(values)} tokens instead of {len(rollout.tokens)}; score exactly "
            "the given tokens"
        )
    if torch.isnan(values).any() if isinstance(values, torch.Tensor) else not values.finite:
        raise TeacherError(f"{where} hold NaN; the teacher's weights or its server are broken")
    if name != "hidden" and isinstance(values, torch.Tensor) and (values > LOGPROB_TOLERANCE).any():
        raise TeacherError(
            f"{where} reach {values.max().item():.3g}, above 0, so they are not log-probabilities"
        )


def measure_rollouts(
    rollouts: Sequence[Rollout], supervised: Sequence[int], step: int, source: SourceConfig
) -> Metrics:
    """Return the sources, staleness, lengths, stop reasons and mean reward of a step's rollouts.

    `supervised` is the number of tokens with a loss in each rollout.
    """
    count = len(rollouts)
    # Replays of drafts are no answers; a source may return nothing else.
    answers = [rollout for rollout in rollouts if not is_replay(rollout)] or rollouts
    prompts = {rollout.prompt.id for rollout in rollouts}
    supervised_prompts = {
        rollout.prompt.id for rollout, tokens in zip(rollouts, supervised, strict=True) if tokens
    }
    sources = Counter(rollout.source for rollout in rollouts)
    metrics = {
        **{f"from_{source}": sources[source] / count for source in ROLLOUT_SOURCES},
        **({"from_reference": sources["reference"] / count} if sources["reference"] else {}),
        "staleness": sum(step - 1 - rollout.policy_version for rollout in rollouts) / count,
        "unsupervised_prompts": float(len(prompts - supervised_prompts)),
        "rollouts": float(count),
        "length": sum(len(answer.tokens) for answer in answers) / len(answers),
        "truncated": sum(answer.stop_reason == "length" for answer in answers) / len(answers),
        "empty": sum(not answer.text.strip() for answer in answers) / len(answers),
    }
    if any(rollout.turns or rollout.stop_reason in FAILURES for rollout in rollouts):
        metrics["failed"] = sum(rollout.stop_reason in FAILURES for rollout in rollouts) / count
    metrics |= measure_conversations(rollouts) | measure_drafts(rollouts)
    label = f"rollout.source: {source.name}: measure"
    metrics |= call_part(source, label, lambda: source.measure(rollouts))
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return metrics | ({"reward": sum(rewards) / len(rewards)} if rewards else {})


def _measure_signals(
    objective: Objective, rollouts: Sequence[Rollout], outputs: TokenRecord
) -> Metrics:
    """Return the metrics that only some signals have."""
    metrics: Metrics = {}
    for term in objective.losses:
        label = f"signal {term.signal.name!r}: measure"
        metrics |= call_part(term.signal, label, partial(term.signal.measure, rollouts, outputs))
    return metrics


def _measure_waiting(
    parts: StepComponents, rollouts: Sequence[Rollout], step: int, settings: StepSettings
) -> Metrics:
    """Measure the work that waits for a later step: turns of users and unfinished answers."""
    metrics: Metrics = {}
    if parts.traffic is not None:
        metrics |= parts.traffic.measure(step, settings.prompts_per_step)
    if parts.curriculum is not None:
        metrics["curriculum/prompts"] = float(len(parts.curriculum.list_chosen()))
    return metrics if parts.segments is None else metrics | parts.segments.measure(rollouts, step)


class PhaseTimer:
    """The seconds of each phase, by the monotonic clock."""

    def __init__(self) -> None:
        self.laps: Metrics = {}
        self._last = monotonic()

    def end_phase(self, phase: str) -> None:
        """Record the seconds since the last phase ended."""
        end = monotonic()
        self.laps[f"seconds_{phase}"] = end - self._last
        self._last = end
