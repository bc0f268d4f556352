"""Several teachers score every rollout, and the student learns from all of them at once.

The sum of reverse KLs to several experts merges them in DeepSeek-V4; it equals the reverse KL to
their geometric pool.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from practicum.core.calls import suggest_name
from practicum.objective import Full, Signal
from practicum.ports import Capabilities, Teacher, TeacherConfig, TeacherContext, walk
from practicum.teaching.members import (
    MemberConfigs,
    TeacherOfMembers,
    build_members,
    intersect_capabilities,
    place_members,
)
from practicum.types import PooledSignal, Rollout, TeacherSignal


class Config(TeacherConfig):
    """The members, and how they are combined; weights are equal and sum to 1 unless written."""

    type: Literal["pool"] = "pool"
    kind: Literal["geometric", "arithmetic", "sum"] = Field(
        default="geometric",
        description="the product of the members, their average, or the sum of their losses",
    )
    teachers: MemberConfigs = Field(description="the members by name")
    weights: dict[str, float] = Field(
        default={}, description="the weight of every member; empty: equal, summing to 1"
    )
    gate: float | None = Field(
        default=None,
        ge=0,
        description="leave out members whose entropy at a token exceeds this (nats)",
    )

    @model_validator(mode="after")
    def _check_weights(self) -> "Config":
        for name, weight in self.weights.items():
            if name not in self.teachers:
                raise ValueError(
                    f"weights: no member is named {name!r}; {suggest_name(name, self.teachers)}"
                )
            if not 0 < weight < math.inf:
                raise ValueError(f"weights: {name} must be a positive number, got {weight:g}")
        unweighted = [name for name in self.teachers if self.weights and name not in self.weights]
        if unweighted:
            raise ValueError(
                f"weights: {', '.join(unweighted)} has none; write one for every member or none "
                "at all"
            )
        nested = [config for member in self.teachers.values() for _, config in walk(member)]
        if any(isinstance(config, Config) for config in nested):
            raise ValueError(
                "teachers: a pool within a pool is not combined; name its members in this one"
            )
        if self.gate is not None and self.kind == "sum":
            raise ValueError(
                "gate: a sum is read teacher by teacher, so none can step in for another; "
                "write kind: geometric"
            )
        if not self.capabilities().signals and self._intersect().by_span:
            raise ValueError(
                "kind: the average of probabilities is of single tokens, and a member with another "
                "tokenizer knows that of several together; write kind: geometric or sum, or take "
                "members that give whole distributions"
            )
        if self.gate is not None and "full" not in self._intersect().signals:
            raise ValueError(
                "gate: the entropy of a member is known only where it can give its whole "
                "distribution"
            )
        return self

    def capabilities(self) -> Capabilities:
        """Return every signal if all members give distributions, else the sampled token alone."""
        return _pool_capabilities(self._intersect(), self.kind)

    def members(self) -> dict[str, TeacherConfig]:
        """Return the settings of every member."""
        return place_members(self.teachers)

    def _intersect(self) -> Capabilities:
        return intersect_capabilities(member.capabilities() for member in self.teachers.values())


def _pool_capabilities(members: Capabilities, kind: str) -> Capabilities:
    """Return what can be combined from members that have these capabilities in common."""
    signals = members.signals
    if kind == "arithmetic" and members.by_span:
        # Probabilities of spans have no average by which a token could be known: distributions do.
        signals = signals - {"sampled"} if "full" in signals else frozenset()
    pool = Capabilities(
        signals,
        writes=False,
        follows_student=members.follows_student,
        splits_answers=kind == "sum",
        by_span=members.by_span,
        repeats_scores=members.repeats_scores,
    )
    if "full" in members.signals:
        return pool
    return replace(pool, signals=signals & {"sampled"}, supports=frozenset())


class PoolTeacher(TeacherOfMembers):
    """A teacher that asks every member about every rollout; see `practicum.ports.Teacher`."""

    def __init__(self, members: Mapping[str, Teacher], config: Config) -> None:
        super().__init__(members)
        self._config = config
        weights = [config.weights.get(name, 1 / len(members)) for name in members]
        total = sum(weights) if config.kind == "arithmetic" else 1.0
        self._weights = [weight / total for weight in weights]

    @property
    def capabilities(self) -> Capabilities:
        """The signals that can be combined from the members' answers."""
        return _pool_capabilities(
            intersect_capabilities(member.capabilities for member in self._members.values()),
            self._config.kind,
        )

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return the members' signals side by side for each rollout.

        Unless sampled tokens suffice, members give whole distributions: the best candidates of a
        pool are not the best candidates of its members.
        """
        # A gate needs the entropy of each member, and so its whole distribution.
        member_signal = signal if signal.sampled and self._config.gate is None else Full()
        answers = [self._ask(name, rollouts, member_signal) for name in self._members]
        return [self._combine(members) for members in zip(*answers, strict=True)]

    def _combine(self, answers: Sequence[TeacherSignal]) -> TeacherSignal:
        """Return the pool of the members that answer; they share the weight of the silent ones.

        The signal is silent if all members are.
        """
        weighted = [
            (weight, answer)
            for weight, answer in zip(self._weights, answers, strict=True)
            if not answer.is_empty
        ]
        if not weighted:
            return TeacherSignal()
        # The weights keep their sum, so that a silent member does not lower the loss.
        scale = sum(self._weights) / sum(weight for weight, _ in weighted)
        weights = tuple(weight * scale for weight, _ in weighted)
        members = tuple(answer for _, answer in weighted)
        return TeacherSignal(
            pool=PooledSignal(self._config.kind, weights, members, self._config.gate)
        )


def build(config: Config, context: TeacherContext) -> Teacher:
    """Build every member."""
    return PoolTeacher(build_members(config.teachers, context), config)
