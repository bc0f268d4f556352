"""Each rollout goes to one of several teachers: by domain, by the teacher its prompt names, by outcome, or by a field.

Routing by domain is how several experts become one student in MiMo-V2-Flash (2601.02780).
"""

import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from practicum.core.calls import did_you_mean
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
from practicum.teachers._members import (
    MemberConfigs,
    TeacherOfMembers,
    build_members,
    by_place,
    intersect_capabilities,
)
from practicum.teachers._outcome import Outcome, classify_outcome
from practicum.types import Prompt, Rollout, Sample, SamplingParams, TeacherSignal

Item = TypeVar("Item")


class Config(BaseModel):
    """Who scores which rollout; a member `none` leaves its rollouts unscored."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["route"] = "route"
    by: str = Field(
        default="domain",
        description="`domain`, `teacher`, `outcome`, or a privileged field of the prompt",
    )
    teachers: MemberConfigs = Field(description="each teacher under the value that leads to it")
    default: str | None = Field(
        default=None, description="the member for every other value; none: they are errors"
    )

    @model_validator(mode="after")
    def _leads_somewhere(self) -> "Config":
        if self.default is not None and self.default not in self.teachers:
            raise ValueError(
                f"default: no member is named {self.default!r}; {did_you_mean(self.default, self.teachers)}"
            )
        outcomes = typing.get_args(Outcome)
        if self.by == "outcome":
            for name in self.teachers.keys() - {*outcomes, self.default}:
                raise ValueError(
                    f"by outcome nothing leads to {name!r}; {did_you_mean(name, outcomes)}"
                )
        return self

    def capabilities(self) -> Capabilities:
        """What every member can answer; by outcome nothing can be written, for there is no outcome before."""
        return self.joined(member.capabilities() for member in self.teachers.values())

    def members(self) -> dict[str, TeacherConfig]:
        """Every member."""
        return by_place(self.teachers)

    def joined(self, members: Iterable[Capabilities]) -> Capabilities:
        """What members that can do so much can do together."""
        answered = intersect_capabilities(members)
        return replace(answered, writes=answered.writes and self.by != "outcome")


class RouteTeacher(TeacherOfMembers):
    """Sorts rollouts by member and asks each member once; see `practicum.ports.Teacher`."""

    def __init__(self, members: Mapping[str, Teacher], config: Config) -> None:
        super().__init__(members)
        self._config = config

    @property
    def capabilities(self) -> Capabilities:
        """What every member can answer."""
        return self._config.joined(member.capabilities for member in self._members.values())

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """What each rollout's own member says, under that member's name."""
        answers = [TeacherSignal()] * len(rollouts)
        for name, places in self._sorted(rollouts, self._of_rollout).items():
            own = self._ask(name, [rollouts[place] for place in places], signal)
            for place, answer in zip(places, own, strict=True):
                answers[place] = answer
        return answers

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        """Each prompt's own member answers; None by outcome, for there is none yet, or where a member cannot."""
        if self._config.by == "outcome":
            return None
        answers: dict[int, Sample] = {}
        for name, places in self._sorted(
            requests, lambda request: self._of_prompt(request.prompt)
        ).items():
            own = self._members[name].sample([requests[place] for place in places], params)
            if own is None:
                return None
            answers.update(zip(places, own, strict=True))
        return [answers[place] for place in range(len(requests))]

    def voice(self, prompt: Prompt) -> PromptedClient | None:
        """That of the prompt's own member; None by outcome."""
        return (
            None
            if self._config.by == "outcome"
            else self._members[self._of_prompt(prompt)].voice(prompt)
        )

    def _sorted(self, items: Iterable[Item], member: Callable[[Item], str]) -> dict[str, list[int]]:
        """The places of the items, by the member they go to."""
        places: dict[str, list[int]] = {}
        for place, item in enumerate(items):
            places.setdefault(member(item), []).append(place)
        return places

    def _of_rollout(self, rollout: Rollout) -> str:
        return (
            self._member(rollout.prompt, classify_outcome(rollout))
            if self._config.by == "outcome"
            else self._of_prompt(rollout.prompt)
        )

    def _of_prompt(self, prompt: Prompt) -> str:
        named = {"domain": prompt.domain, "teacher": prompt.teacher}
        return self._member(
            prompt,
            named[self._config.by]
            if self._config.by in named
            else prompt.privileged.get(self._config.by),
        )

    def _member(self, prompt: Prompt, key: str | None) -> str:
        """The member that a key leads to; DataError where it leads nowhere."""
        if key is not None and key in self._members:
            return key
        if self._config.default is None:
            found = (
                f"has no {self._config.by}"
                if key is None
                else f"has the {self._config.by} {key!r}, to which no teacher belongs"
            )
            known = ", ".join(self._members)
            raise DataError(
                f"prompt {prompt.id!r} {found}; the route knows {known}: add a teacher for it under teacher.teachers, or "
                "name one of them as teacher.default"
            )
        return self._config.default


def build(config: Config, context: TeacherContext) -> Teacher:
    """Build every member."""
    return RouteTeacher(build_members(config.teachers, context), config)
