"""Completions of other writers in addition to the student's completions."""

from collections.abc import Sequence
from typing import Literal, get_args

from pydantic import Field, field_validator

from practicum.rollouts.batch import RolloutKey, call_by_group, list_keys
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
        writers = ["student" for _ in range(count)]
        writers += [writer for writer in self.other_writers for _ in range(self.n)]
        plan = [
            pair
            for group in list_keys(batch, len(writers))
            for pair in zip(group, writers, strict=True)
        ]

        def fill(rows: list[int]) -> list[Rollout]:
            return parts.sample_writer(plan[rows[0]][1], [plan[row][0] for row in rows], self)

        return call_by_group([writer for _, writer in plan], fill)
