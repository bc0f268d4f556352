"""Overlap sampling, scoring and training. No result depends on the clock.

The policy after step t - 1 - lag samples the rollouts of step t, regardless of the speed of each
thread; the initial policy samples the first steps. A step therefore trains on all of its prompts,
with long and short completions, and waits for late completions.

Two threads work ahead of the training thread. The first thread samples and rewards with a copy of
the weights; the second thread asks the teachers. The training thread starts the steps in order,
passes the copy on, and takes the results in the same order.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from practicum.core.abandon import cancel_scope
from practicum.costs import UsageByPhase, read_usage, write_usage
from practicum.models.tensors import SavedTensor
from practicum.ports import SamplingClient
from practicum.ports.scoring import name_role
from practicum.rollouts import RolloutRow
from practicum.training.judging import judge_with
from practicum.training.loop import (
    PhaseTimer,
    StepComponents,
    StepPlan,
    StepSettings,
    build_teacher_queries,
    generate_rollouts,
    score_rollouts,
    score_with,
    train_step,
    update_student,
)
from practicum.types import Judgement, Prompt, Rollout, StepResult, TeacherSignal

T = TypeVar("T")

State = Mapping[str, SavedTensor]
"""The tensors of one teacher that a resumed run cannot recompute."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The rollouts of a step with their rewards, and the work of sampling them."""

    step: int
    rollouts: list[Rollout]
    work: UsageByPhase

    def to_json(self) -> dict[str, Any]:
        """Return the step as JSON data, with exact floats."""
        rows = [
            {
                **RolloutRow.of(self.step, rollout).to_json(),
                # The prompt of a conversation's turn contains the earlier turns, so it is not the
                # task's prompt.
                "asked": asdict(rollout.prompt),
                "reward": rollout.reward,
                "candidates": None if rollout.candidates is None else rollout.candidates.tolist(),
            }
            for rollout in self.rollouts
        ]
        return {"step": self.step, "rollouts": rows, "work": write_usage(self.work)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "SampledStep":
        """Read back the result of `to_json`."""
        rollouts = list(map(_read_rollout, row["rollouts"]))
        return cls(row["step"], rollouts, read_usage(row["work"]))


def _read_rollout(saved: Mapping[str, Any]) -> Rollout:
    fields = {name: saved[name] for name in RolloutRow.model_fields if name in saved}
    candidates = saved["candidates"]
    return replace(
        RolloutRow.model_validate(fields).to_rollout(Prompt.from_json(saved["asked"])),
        reward=saved["reward"],
        candidates=None if candidates is None else torch.tensor(candidates, dtype=torch.long),
    )


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """The signals and judgements of the teachers and scorers that are asked ahead of time.

    `work` is the work of computing them. `states` are the states of these teachers and scorers
    afterwards, by role.
    """

    signals: dict[str, list[TeacherSignal]]
    judgements: dict[str, list[Judgement]]
    work: UsageByPhase
    states: dict[str, State]


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A started step that has not been trained on yet."""

    step: int
    sampled: Future[SampledStep]
    scored: Future[ScoredStep]


class SequentialSteps:
    """Run steps sequentially in one thread; no step is ever in flight."""

    def __enter__(self) -> "SequentialSteps":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is no thread to end."""

    def step(self, step: int, parts: StepComponents, settings: StepSettings) -> StepResult:
        """Run one step; see `practicum.training.loop.train_step`."""
        return train_step(step, parts, settings)

    def wait_until_idle(self) -> None:
        """Return immediately: no work is in progress."""

    def has_all_rollouts(self) -> bool:
        """Return True: no step is in flight."""
        return True

    def save_state(self) -> list[dict[str, Any]]:
        """Return an empty list: no step is in flight."""
        return []

    def get_state(self, role: str) -> None:
        """Return None: the teacher or scorer itself holds the state after the newest step."""


class OverlappedSteps:
    """Run steps with rollouts that are sampled `lag` updates before training uses them.

    Leaving the context cancels the steps in flight and ends both threads. Teachers and scorers of
    the `synchronous_roles` (`teacher`, `reference`, `scorer-NAME`) follow the student or share its
    modules, so the training thread asks them when their step is due.
    """

    def __init__(
        self,
        parts: StepComponents,
        settings: StepSettings,
        last: int,
        lag: int,
        synchronous_roles: Collection[str] = (),
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._last = last
        self._lag = lag
        self._synchronous_roles = synchronous_roles
        self._in_flight: deque[_InFlightStep] = deque()
        self._states: dict[str, State] = {}
        self._cancel_event = threading.Event()
        # Both threads can need the teacher: one to sample from it, one to score with it.
        self._teacher_lock = threading.RLock()
        self._sampling_executor = ThreadPoolExecutor(1, "rollouts")
        self._scoring_executor = ThreadPoolExecutor(1, "teachers")

    def __enter__(self) -> "OverlappedSteps":
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel_event.set()
        for executor in (self._sampling_executor, self._scoring_executor):
            executor.shutdown(cancel_futures=True)

    def resume(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Put the steps of an earlier `save_state` in flight; teachers score them again."""
        # Signals can be full distributions, so a checkpoint stores only the rollouts. The teachers
        # are restored to their state before these steps, so they return the same signals again.
        for row in rows:
            sampled: Future[SampledStep] = Future()
            sampled.set_result(SampledStep.from_json(row))
            self._start_scoring(row["step"], sampled)

    def step(self, step: int, parts: StepComponents, settings: StepSettings) -> StepResult:
        """Start the steps that the current weights may sample, then finish this step and train."""
        timer = PhaseTimer()
        self._start_steps(step)
        in_flight = self._in_flight[0]
        assert in_flight.step == step, "steps are trained on in the order in which they started"
        sampled = in_flight.sampled.result()
        timer.end_phase("sample")
        scored = in_flight.scored.result()
        plan = settings.plan(step)
        datums = score_rollouts(
            sampled.rollouts, plan.objective, parts, scored.signals, scored.judgements
        )
        timer.end_phase("score")
        self._in_flight.popleft()
        # The threads count their work separately, and it enters the ledger with the step that uses
        # it. The costs of a step therefore do not depend on which thread was faster.
        for lap in (sampled.work, scored.work):
            parts.ledger.merge(lap)
        self._states = scored.states
        return update_student(step, datums, plan, parts, settings, timer)

    def wait_until_idle(self) -> None:
        """Block until all steps in flight are sampled and scored; errors wait for their step."""
        wait([in_flight.scored for in_flight in self._in_flight])

    def has_all_rollouts(self) -> bool:
        """Return True if no step in flight failed while sampling, so that all can be saved."""
        return all(in_flight.sampled.exception() is None for in_flight in self._in_flight)

    def save_state(self) -> list[dict[str, Any]]:
        """Wait until the steps in flight are sampled, and return their rollouts."""
        return [in_flight.sampled.result().to_json() for in_flight in self._in_flight]

    def get_state(self, role: str) -> State | None:
        """Return the state of a teacher or scorer after the newest step; None if not asked ahead."""
        # The teacher itself is steps ahead, so a checkpoint needs its state right after the newest
        # finished step.
        return self._states.get(role)

    def _start_steps(self, step: int) -> None:
        """Start the steps up to `step + lag`; only the first call starts more than one."""
        first = self._in_flight[-1].step + 1 if self._in_flight else step
        steps = range(first, min(step + self._lag, self._last) + 1)
        if not steps:
            return
        # The snapshot is a copy: the optimizer changes the student while the sampling thread still
        # reads these weights.
        client = self._parts.student.snapshot()
        for number in steps:
            plan = self._settings.plan(number)
            sampled = self._submit(self._sampling_executor, self._sample_step, number, plan, client)
            self._start_scoring(number, sampled)

    def _start_scoring(self, step: int, sampled: Future[SampledStep]) -> None:
        plan = self._settings.plan(step)
        scored = self._submit(self._scoring_executor, self._score_step, sampled, plan)
        self._in_flight.append(_InFlightStep(step, sampled, scored))

    def _submit(
        self, executor: ThreadPoolExecutor, work: Callable[..., T], *args: object
    ) -> Future[T]:
        """Submit work to an executor inside this object's cancel scope."""

        def run_cancellably() -> T:
            with cancel_scope(self._cancel_event):
                return work(*args)

        # Threads do not inherit context variables, which hold the listeners of the log.
        return executor.submit(copy_context().run, run_cancellably)

    def _sample_step(self, step: int, plan: StepPlan, client: SamplingClient) -> SampledStep:
        """Sample and reward the rollouts of a step."""
        version = max(step - 1 - self._lag, 0)
        is_asked = bool({"teacher", "reference"}.intersection(plan.source.other_writers))
        lock = self._teacher_lock if is_asked else nullcontext()
        with lock, self._parts.ledger.record_separately() as work:
            rollouts = generate_rollouts(
                step, plan, self._parts, self._settings, client, version, self._teacher_lock
            )
        return SampledStep(step, rollouts, work)

    def _score_step(self, sampled: Future[SampledStep], plan: StepPlan) -> ScoredStep:
        """Ask the teachers and scorers that can be asked ahead of time about a step's rollouts."""
        rollouts = sampled.result().rollouts
        with self._teacher_lock, self._parts.ledger.record_separately() as work:
            judgements = {
                name: judge_with(name, scorer, rollouts)
                for name, scorer in self._parts.scorers.items()
                if name_role(name) not in self._synchronous_roles
            }
            signals = {
                role: score_with(teacher, rollouts, signal)
                for role, (teacher, signal) in build_teacher_queries(
                    plan.objective, self._parts
                ).items()
                if role not in self._synchronous_roles
            }
            states = {
                role: follower.save_state()
                for role, follower in self._parts.followers.items()
                if role not in self._synchronous_roles
            }
        return ScoredStep(signals, judgements, work, states)


StepRunner = SequentialSteps | OverlappedSteps
"""The two ways to run training steps."""


def open_step_runner(
    parts: StepComponents,
    settings: StepSettings,
    last: int,
    lag: int,
    synchronous_roles: Collection[str] = (),
    in_flight: Sequence[Mapping[str, Any]] = (),
) -> StepRunner:
    """Return a runner of sequential steps, or of steps that overlap by `lag` updates.

    `in_flight` are the steps in flight of a checkpoint.
    """
    if not lag:
        return SequentialSteps()
    runner = OverlappedSteps(parts, settings, last, lag, synchronous_roles)
    runner.resume(in_flight)
    return runner
