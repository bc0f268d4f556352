"""Each rollout goes to one of several teachers: by domain, teacher name, outcome or another field.

Routing by domain is how MiMo-V2-Flash (2601.02780) merges several experts into one student.
"""

import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field, model_validator

from practicum.core.calls import suggest_name
from practicum.errors import DataError
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    PromptedClient,
    Teacher,
    TeacherConfig,
    TeacherContext,
    TeacherRequest,
)
from practicum.rollouts.fields import Outcome, classify_outcome
from practicum.statistics import group_pairs
from practicum.teaching.members import (
    MemberConfigs,
    TeacherOfMembers,
    build_members,
    intersect_capabilities,
    place_members,
)
from practicum.types import Prompt, Rollout, Sample, SamplingParams, TeacherSignal


class Config(TeacherConfig):
    """The teachers, and the field that chooses among them; `none` leaves rollouts unscored."""

    type: Literal["route"] = "route"
    key: str = Field(
        default="domain",
        description="`domain`, `teacher`, `outcome`, or a privileged field of the prompt",
    )
    teachers: MemberConfigs = Field(description="each teacher under the value that selects it")
    default: str | None = Field(
        default=None, description="the member for other values; none: they are errors"
    )

    @model_validator(mode="after")
    def _check_names(self) -> "Config":
        if self.default is not None and self.default not in self.teachers:
            raise ValueError(
                f"default: no member is named {self.default!r}; "
                f"{suggest_name(self.default, self.teachers)}"
            )
        outcomes = typing.get_args(Outcome)
        if self.key == "outcome":
            for name in self.teachers.keys() - {*outcomes, self.default}:
                raise ValueError(f"no outcome selects {name!r}; {suggest_name(name, outcomes)}")
        return self

    def capabilities(self) -> Capabilities:
        """Return what all members can answer; by outcome, teachers cannot generate."""
        return self.intersect(member.capabilities() for member in self.teachers.values())

    def choose_member(self, prompt: Prompt, outcome: Outcome | None = None) -> str:
        """Return the member that the prompt's field selects; DataError if it selects none."""
        fields = {**prompt.privileged, "domain": prompt.domain, "teacher": prompt.teacher}
        key = outcome if self.key == "outcome" else fields.get(self.key)
        if key is not None and key in self.teachers:
            return key
        if self.default is None:
            reason = f"has the {self.key} {key!r}, which selects no teacher"
            if key is None:
                reason = f"has no {self.key}"
            raise DataError(
                f"prompt {prompt.id!r} {reason}; the route knows {', '.join(self.teachers)}: add a "
                "teacher for it under teacher.teachers, or name one of them as teacher.default"
            )
        return self.default

    def check_prompts(self, prompts: Iterable[Prompt]) -> None:
        """Raise DataError at the first prompt without a member; outcomes are not known yet."""
        if self.key != "outcome":
            for prompt in prompts:
                self.choose_member(prompt)

    def members(self) -> dict[str, TeacherConfig]:
        """Return the settings of every member."""
        return place_members(self.teachers)

    def intersect(self, members: Iterable[Capabilities]) -> Capabilities:
        """Return what all members can answer; without a completion there is no outcome."""
        shared = intersect_capabilities(members)
        return replace(shared, writes=shared.writes and self.key != "outcome")


class RouteTeacher(TeacherOfMembers):
    """A teacher that asks each member once, for its rollouts; see `practicum.ports.Teacher`."""

    def __init__(self, members: Mapping[str, Teacher], config: Config) -> None:
        super().__init__(members)
        self._config = config

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that all members share."""
        return self._config.intersect(member.capabilities for member in self._members.values())

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return the signal of each rollout's member, under that member's name."""
        names = [
            self._config.choose_member(rollout.prompt, classify_outcome(rollout))
            for rollout in rollouts
        ]
        signals: dict[int, TeacherSignal] = {}
        for name, indices in _group_indices(names).items():
            answers = self._ask(name, [rollouts[index] for index in indices], signal)
            signals.update(zip(indices, answers, strict=True))
        return [signals[index] for index in range(len(rollouts))]

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        """Sample from each prompt's member; None by outcome, or if a member cannot generate."""
        if self._config.key == "outcome":
            return None
        names = [self._config.choose_member(request.prompt) for request in requests]
        samples: dict[int, Sample] = {}
        for name, indices in _group_indices(names).items():
            answers = self._members[name].sample([requests[index] for index in indices], params)
            if answers is None:
                return None
            samples.update(zip(indices, answers, strict=True))
        return [samples[index] for index in range(len(requests))]

    def bind_prompt(self, prompt: Prompt) -> PromptedClient | None:
        """Return the client of the prompt's member; None by outcome."""
        if self._config.key == "outcome":
            return None
        return self._members[self._config.choose_member(prompt)].bind_prompt(prompt)


def _group_indices(names: Iterable[str]) -> dict[str, list[int]]:
    return group_pairs((name, index) for index, name in enumerate(names))


def build(config: Config, context: TeacherContext) -> Teacher:
    """Build every member."""
    return RouteTeacher(build_members(config.teachers, context), config)
