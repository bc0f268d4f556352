"""Rollouts ahead of the updates: sampling, scoring and learning overlap, and nothing of what they give depends on the clock.

The rollouts of step t are always drawn by the policy after step t - 1 - lag (that of the start before there is one), however fast
anybody is. So a step learns from its own prompts, all of them, long answers and short ones; what is late is waited for.

Two threads work ahead of the learner. One samples and rewards, under a copy of the weights; the other asks the teachers. The
learner's thread decides what is begun, in the order of the steps, hands the copy over, and takes what is ready in that order.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from practicum.core.abandon import cancel_scope
from practicum.costs import Lap, Usage
from practicum.ports import SamplingClient
from practicum.rollouts import RolloutRow, asks_teacher
from practicum.training.loop import (
    PhaseTimer,
    StepComponents,
    StepPlan,
    StepResult,
    StepSettings,
    build_teacher_queries,
    generate_rollouts,
    score_rollouts,
    score_with,
    train_step,
    update_student,
)
from practicum.types import Prompt, Rollout, TeacherSignal

T = TypeVar("T")

State = dict[str, Tensor]
"""The tensors of one teacher that a resume cannot recompute."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """The rollouts of a step that was begun, rewarded, and the work that they took."""

    step: int
    rollouts: list[Rollout]
    work: Lap

    def row(self) -> dict[str, Any]:
        """The same as JSON data, every number with all its digits."""
        rows = [
            {
                **RolloutRow.of(self.step, rollout).to_json(),
                "reward": rollout.reward,
                "candidates": None if rollout.candidates is None else rollout.candidates.tolist(),
            }
            for rollout in self.rollouts
        ]
        work = [
            [phase, name, done.tokens, done.prompt_tokens, done.flops, done.wire_bytes]
            for (phase, name), done in self.work.items()
        ]
        return {"step": self.step, "rollouts": rows, "work": work}

    @classmethod
    def read(cls, row: Mapping[str, Any], prompts: Mapping[str, Prompt]) -> "SampledStep":
        """What `row` gave, with the prompts by their ids."""
        rollouts = [
            replace(
                RolloutRow.model_validate(
                    {name: one[name] for name in RolloutRow.model_fields if name in one}
                ).rollout(prompts[one["prompt"]]),
                reward=one["reward"],
                candidates=None
                if one["candidates"] is None
                else torch.tensor(one["candidates"], dtype=torch.long),
            )
            for one in row["rollouts"]
        ]
        return cls(
            row["step"],
            rollouts,
            {(phase, name): Usage(*done) for phase, name, *done in row["work"]},
        )


@dataclass(frozen=True, slots=True)
class ScoredStep:
    """What those teachers said that are asked ahead, the work that it took, and where it left them."""

    said: dict[str, list[TeacherSignal]]
    work: Lap
    states: dict[str, State]


@dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A step on its way."""

    step: int
    written: Future[SampledStep]
    answered: Future[ScoredStep]


class SequentialSteps:
    """One step after the other, all in one thread; what `OverlappedSteps` promises is plain here."""

    def __enter__(self) -> "SequentialSteps":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left over."""

    def step(self, step: int, parts: StepComponents, settings: StepSettings) -> StepResult:
        """As `practicum.training.loop.train_step`."""
        return train_step(step, parts, settings)

    def rest(self) -> None:
        """Nothing is being done."""

    def whole(self) -> bool:
        """Nothing was begun."""
        return True

    def save_state(self) -> list[dict[str, Any]]:
        """Nothing was begun."""
        return []

    def teacher_state(self, role: str) -> None:
        """The teacher's own state is that after the newest step."""


class OverlappedSteps:
    """Steps whose rollouts are drawn `lag` updates before they are learned from; a context, which ends its threads.

    `in_turn` are the roles (`teacher`, `reference`) that share the student's modules or weights; they are asked in the learner's
    thread, at their step. `begun` is what a checkpoint holds of the steps after it.
    """

    def __init__(
        self,
        parts: StepComponents,
        settings: StepSettings,
        last: int,
        lag: int,
        in_turn: Collection[str] = (),
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._last = last
        self._lag = lag
        self._in_turn = in_turn
        self._begun: deque[_InFlightStep] = deque()
        self._states: dict[str, State] = {}
        self._told = threading.Event()
        self._teacher = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "rollouts")
        self._asker = ThreadPoolExecutor(1, "teachers")

    def __enter__(self) -> "OverlappedSteps":
        return self

    def __exit__(self, *_: object) -> None:
        self._told.set()
        for pool in (self._writer, self._asker):
            pool.shutdown(cancel_futures=True)

    def resume(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Go on with what `save_state` gave; teachers are asked again."""
        prompts = {prompt.id: prompt for prompt in self._parts.prompts}
        for row in rows:
            ready: Future[SampledStep] = Future()
            ready.set_result(SampledStep.read(row, prompts))
            self._ask(row["step"], ready)

    def step(self, step: int, parts: StepComponents, settings: StepSettings) -> StepResult:
        """Begin what may be begun under the weights of now, wait for the step's rollouts and answers, and learn."""
        clock = PhaseTimer()
        self._begin(step)
        in_flight = self._begun[0]
        assert in_flight.step == step, (
            "steps are learned from in the order in which they were begun"
        )
        written = in_flight.written.result()
        clock.end_phase("sample")
        answered = in_flight.answered.result()
        now = settings.plan(step)
        data = score_rollouts(written.rollouts, now.objective, parts, answered.said)
        clock.end_phase("score")
        self._begun.popleft()
        for lap in (written.work, answered.work):
            parts.ledger.put(lap)
        self._states = answered.states
        return update_student(step, data, now, parts, settings, clock)

    def rest(self) -> None:
        """Wait until all that was begun is written and answered; what failed says so at its step."""
        wait([in_flight.answered for in_flight in self._begun])

    def whole(self) -> bool:
        """Whether the rollouts of all steps that were begun came about."""
        return all(in_flight.written.exception() is None for in_flight in self._begun)

    def save_state(self) -> list[dict[str, Any]]:
        """The rollouts of the steps that were begun, once they are written."""
        return [in_flight.written.result().row() for in_flight in self._begun]

    def teacher_state(self, role: str) -> State | None:
        """That after the newest step, of a teacher that is asked ahead."""
        return self._states.get(role)

    def _begin(self, step: int) -> None:
        """Begin the steps up to `step + lag`, of which all but the last were begun before, unless this is the first."""
        first = self._begun[-1].step + 1 if self._begun else step
        numbers = range(first, min(step + self._lag, self._last) + 1)
        client = self._parts.student.snapshot() if numbers else None
        for number in numbers:
            assert client is not None, "there is a client where there is a step to begin"
            self._ask(
                number,
                self._submit(
                    self._writer, self._sample_step, number, self._settings.plan(number), client
                ),
            )

    def _ask(self, step: int, written: Future[SampledStep]) -> None:
        now = self._settings.plan(step)
        self._begun.append(
            _InFlightStep(step, written, self._submit(self._asker, self._score_step, written, now))
        )

    def _submit(
        self, pool: ThreadPoolExecutor, work: Callable[..., T], *given: object
    ) -> Future[T]:
        """Let a thread do some work, which ends early when nobody waits for it any more."""

        def abandoned_if_told() -> T:
            with cancel_scope(self._told):
                return work(*given)

        return pool.submit(copy_context().run, abandoned_if_told)

    def _sample_step(self, step: int, now: StepPlan, client: SamplingClient) -> SampledStep:
        """Sample and reward."""
        version = max(step - 1 - self._lag, 0)
        turn = self._teacher if asks_teacher(now.source) else nullcontext()
        with turn, self._parts.ledger.record_separately() as work:
            rollouts = generate_rollouts(step, now, self._parts, self._settings, client, version)
        return SampledStep(step, rollouts, work)

    def _score_step(self, written: Future[SampledStep], now: StepPlan) -> ScoredStep:
        """Ask the teachers that can be asked ahead."""
        rollouts = written.result().rollouts
        asked = {
            role: ask
            for role, ask in build_teacher_queries(now.objective, self._parts).items()
            if role not in self._in_turn
        }
        with self._teacher, self._parts.ledger.record_separately() as work:
            said = {
                role: score_with(teacher, rollouts, signal)
                for role, (teacher, signal) in asked.items()
            }
            states = {
                role: teacher.save_state()
                for role, (teacher, _) in asked.items()
                if teacher is not None
            }
        return ScoredStep(said, work, states)


Stages = SequentialSteps | OverlappedSteps
"""How a run comes from step to step."""


def open_step_runner(
    parts: StepComponents,
    settings: StepSettings,
    last: int,
    lag: int,
    in_turn: Collection[str] = (),
    begun: Sequence[Mapping[str, Any]] = (),
) -> Stages:
    """Steps in turn, or `lag` updates ahead; `begun` is what a checkpoint holds of later steps."""
    if not lag:
        return SequentialSteps()
    ahead = OverlappedSteps(parts, settings, last, lag, in_turn)
    ahead.resume(begun)
    return ahead
