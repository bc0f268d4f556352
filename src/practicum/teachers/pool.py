"""Several teachers score every rollout, and the student learns from all of them at once.

The sum of reverse KLs to several experts merges them in DeepSeek-V4; it is the reverse KL to their geometric pool.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from practicum.core.calls import did_you_mean
from practicum.objective import Full, Signal
from practicum.ports import Capabilities, Teacher, TeacherConfig, TeacherContext, walk
from practicum.teachers._members import (
    MemberConfigs,
    TeacherOfMembers,
    build_members,
    by_place,
    intersect_capabilities,
)
from practicum.types import PooledSignal, Rollout, TeacherSignal


class Config(BaseModel):
    """Which teachers, and how they are combined; their weights are equal, and sum to 1, where none are written."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["pool"] = "pool"
    kind: Literal["geometric", "arithmetic", "sum"] = Field(
        default="geometric",
        description="the product of the members, their average, or the sum of their losses",
    )
    teachers: MemberConfigs = Field(description="the members by name")
    weights: dict[str, float] = Field(
        default={}, description="of every member; empty: equal, and 1 in sum"
    )
    gate: float | None = Field(
        default=None, ge=0, description="a member less certain than this entropy is left out"
    )

    @model_validator(mode="after")
    def _adds_up(self) -> "Config":
        for name, weight in self.weights.items():
            if name not in self.teachers:
                raise ValueError(
                    f"weights: no member is named {name!r}; {did_you_mean(name, self.teachers)}"
                )
            if not 0 < weight < math.inf:
                raise ValueError(f"weights: {name} must be a positive number, got {weight:g}")
        unweighted = [name for name in self.teachers if self.weights and name not in self.weights]
        if unweighted:
            raise ValueError(
                f"weights: {', '.join(unweighted)} has none; write one for every member or none at all"
            )
        if any(
            isinstance(inside, Config)
            for member in self.teachers.values()
            for _, inside in walk(member)
        ):
            raise ValueError(
                "teachers: a pool within a pool is not combined; name its members in this one"
            )
        if self.gate is not None and self.kind == "sum":
            raise ValueError(
                "gate: a sum is read teacher by teacher, so none can step in for another; write kind: geometric"
            )
        if self.gate is not None and "full" not in self._shared().signals:
            raise ValueError(
                "gate: the entropy of a member is known only where it can give its whole distribution"
            )
        return self

    def capabilities(self) -> Capabilities:
        """Every signal where all members give whole distributions, for theirs is combined; else sampled tokens alone."""
        return _pool_capabilities(self._shared())

    def members(self) -> dict[str, TeacherConfig]:
        """Every member."""
        return by_place(self.teachers)

    def member_weights(self) -> list[float]:
        """The weights in the order of the members; those of an arithmetic pool are made to sum to 1."""
        given = [self.weights.get(name, 1 / len(self.teachers)) for name in self.teachers]
        total = sum(given) if self.kind == "arithmetic" else 1.0
        return [weight / total for weight in given]

    def _shared(self) -> Capabilities:
        return intersect_capabilities(member.capabilities() for member in self.teachers.values())


def _pool_capabilities(members: Capabilities) -> Capabilities:
    """What a pool of members that can do so much can do."""
    if "full" not in members.signals:
        return Capabilities(
            members.signals & {"sampled"},
            frozenset(),
            writes=False,
            follows_student=members.follows_student,
        )
    return Capabilities(members.signals, writes=False, follows_student=members.follows_student)


class PoolTeacher(TeacherOfMembers):
    """Asks every member about every rollout; see `practicum.ports.Teacher`."""

    def __init__(self, members: Mapping[str, Teacher], config: Config) -> None:
        super().__init__(members)
        self._config = config
        self._weights = config.member_weights()

    @property
    def capabilities(self) -> Capabilities:
        """What can be combined from the members' answers."""
        return _pool_capabilities(
            intersect_capabilities(member.capabilities for member in self._members.values())
        )

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """The members' answers side by side.

        They give whole distributions wherever sampled tokens do not suffice, for the best candidates of a pool are not
        those of its members.
        """
        asked = signal if signal.sampled and self._config.gate is None else Full()
        answers = [self._ask(name, rollouts, asked) for name in self._members]
        return [self._pooled(of_one) for of_one in zip(*answers, strict=True)]

    def _pooled(self, answers: Sequence[TeacherSignal]) -> TeacherSignal:
        """The pool of the members that speak, which share out the weight of those that do not; silence if none does."""
        speaking = [
            (weight, answer)
            for weight, answer in zip(self._weights, answers, strict=True)
            if not answer.silent
        ]
        if not speaking:
            return TeacherSignal()
        scale = sum(self._weights) / sum(weight for weight, _ in speaking)
        weights = tuple(weight * scale for weight, _ in speaking)
        return TeacherSignal(
            pool=PooledSignal(
                self._config.kind,
                weights,
                tuple(answer for _, answer in speaking),
                self._config.gate,
            )
        )


def build(config: Config, context: TeacherContext) -> Teacher:
    """Build every member."""
    return PoolTeacher(build_members(config.teachers, context), config)
