"""Completions of other writers in addition to the student's completions."""

from collections.abc import Sequence
from typing import Literal, get_args

from pydantic import Field, field_validator, model_validator

from practicum.ports.gate import ask_reward
from practicum.rollouts.batch import RolloutKey, call_by_group, list_keys
from practicum.rollouts.fields import classify_outcome
from practicum.rollouts.source import OtherWriter, SourceConfig, SourceParts
from practicum.types import Rollout

JOINED: tuple[OtherWriter, ...] = get_args(OtherWriter)
"""The writers that a prompt can have in addition to the student."""


class Config(SourceConfig):
    """Add `n` completions of each `other` writer (LUFFY 2504.14945, DistiLLM-2 2503.07067).

    `other` names one or more writers, as in `teacher+reference`. `student` is the number of the
    student's completions, by default `rollout.n`; with 0 the student writes nothing
    (SPIN 2401.01335).
    """

    type: Literal["join"] = "join"
    other: str = "dataset"
    n: int = Field(default=1, ge=1)
    student: int | None = Field(default=None, ge=0)
    filter: Literal["failed_group"] | None = None

    @field_validator("other")
    @classmethod
    def _refuse_unknown(cls, text: str) -> str:
        names = text.split("+")
        if len(set(names)) < len(names) or not set(names) <= set(JOINED):
            raise ValueError(
                f"must be 'dataset', 'teacher' or 'reference', or several joined by +, each once "
                f"(given: {text!r})"
            )
        return text

    @model_validator(mode="after")
    def _check_filter(self) -> "Config":
        if self.filter and self.student == 0:
            raise ValueError("filter=failed_group reads the student's answers; leave student=0 out")
        return self

    @property
    def other_writers(self) -> tuple[OtherWriter, ...]:
        """Return the writers other than the student, in order."""
        named = self.other.split("+")
        return tuple(sorted((name for name in JOINED if name in named), key=named.index))

    def count_teacher_answers(self, n: int) -> float:
        """Return `n` if the teacher is one of the writers, otherwise 0."""
        return self.n if "teacher" in self.other_writers else 0

    def collect(self, keys: Sequence[RolloutKey], parts: SourceParts) -> list[Rollout]:
        """Return the completions of each prompt: first the student's, then each other writer's."""
        batch = parts.sampler.batch
        count = batch.n if self.student is None else self.student
        writers = [writer for writer in self.other_writers for _ in range(self.n)]
        groups = list_keys(batch, count + len(writers))
        first = [key for group in groups for key in group[:count]]
        answers = parts.sample_student(first) if first else []
        if self.filter is not None:
            assert parts.writers.task is not None, "a run has a task"
            answers = [ask_reward(parts.writers.task, answer) for answer in answers]
        by_group = [answers[place * count : (place + 1) * count] for place in range(len(groups))]
        joined = [
            (place, writer, key)
            for place, group in enumerate(groups)
            if self.filter is None or {"incorrect"} == set(map(classify_outcome, by_group[place]))
            for writer, key in zip(writers, group[count:], strict=True)
        ]

        def fill(rows: list[int]) -> list[Rollout]:
            return parts.sample_writer(joined[rows[0]][1], [joined[row][2] for row in rows], self)

        completions = call_by_group([writer for _, writer, _ in joined], fill)
        for (place, _, _), rollout in zip(joined, completions, strict=True):
            by_group[place].append(rollout)
        return [rollout for group in by_group for rollout in group]
