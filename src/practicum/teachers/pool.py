"""Several teachers score every rollout, and the student learns from all of them at once.

DeepSeek-V4 merges experts with the sum of reverse KLs to them, which equals the reverse KL to their
geometric pool.
"""

import math
from collections.abc import Mapping, Sequence
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
    pool_answers,
    pool_capabilities,
)
from practicum.types import Rollout, TeacherSignal


class Config(TeacherConfig):
    """The members, and how they are combined; by default, weights are equal and sum to 1."""

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
        description="leave out members at tokens where their entropy (nats) exceeds this",
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
        if any(config.is_pool for config in nested):
            raise ValueError(
                "teachers: a pool within a pool is not combined; name its members in this one, and "
                "leave out `siblings`"
            )
        if self.gate is not None and self.kind == "sum":
            raise ValueError(
                "gate: a sum adds the teachers one by one, so no teacher can replace another; "
                "set kind: geometric"
            )
        if not self.capabilities().signals and self._intersect().by_span:
            raise ValueError(
                "kind: averaging needs the probability of each token, and a member with another "
                "tokenizer only scores spans of tokens; set kind: geometric or sum, or use "
                "members that give whole distributions"
            )
        if self.gate is not None and "full" not in self._intersect().signals:
            raise ValueError(
                "gate: the entropy of a member is known only if it can give its whole distribution"
            )
        return self

    def capabilities(self) -> Capabilities:
        """Return every signal if all members give distributions, else only the sampled token's."""
        return pool_capabilities(self._intersect(), self.kind)

    @property
    def is_pool(self) -> bool:
        """True."""
        return True

    def members(self) -> dict[str, TeacherConfig]:
        """Return the settings of every member."""
        return place_members(self.teachers)

    def _intersect(self) -> Capabilities:
        return intersect_capabilities(member.capabilities() for member in self.teachers.values())


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
        return pool_capabilities(
            intersect_capabilities(member.capabilities for member in self._members.values()),
            self._config.kind,
        )

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return the combined members' signals for each rollout.

        Unless sampled tokens suffice, members give whole distributions: the best candidates of a
        pool are not the best candidates of its members.
        """
        # A gate needs the entropy of each member, and so its whole distribution.
        is_enough = signal.sampled and self._config.gate is None
        # In a sum each member has its own loss, also about more than distributions.
        is_enough |= self._config.kind == "sum" and isinstance(signal, Full)
        member_signal = signal if is_enough else Full()
        answers = [self._ask(name, rollouts, member_signal) for name in self._members]
        return [
            pool_answers(members, self._weights, self._config.kind, self._config.gate)
            for members in zip(*answers, strict=True)
        ]


def build(config: Config, context: TeacherContext) -> Teacher:
    """Build every member."""
    return PoolTeacher(build_members(config.teachers, context), config)
