"""Several teachers under their names, which is what a route and a pool have in common."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator
from torch import Tensor

from practicum.core.plugins import Plugin
from practicum.errors import TeacherError
from practicum.objective import Signal
from practicum.ports import Capabilities, Teacher, TeacherConfig, TeacherContext
from practicum.types import Datum, Rollout, TeacherSignal

_NAME = re.compile(r"[A-Za-z0-9_-]+")


def _named(teachers: dict[str, Any]) -> dict[str, Any]:
    """The members, if there are any and their names can be part of a tensor's name."""
    if not teachers:
        raise ValueError("no teacher is named; write `teachers: {math: {...}, code: {...}}`")
    for name in teachers:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name a teacher; write letters, digits, '_' and '-'")
    return teachers


MemberConfigs = Annotated[dict[str, Plugin("teachers")], AfterValidator(_named)]
"""The type of a recipe field that holds several teachers' settings by name."""


def by_place(teachers: Mapping[str, TeacherConfig]) -> dict[str, TeacherConfig]:
    """Return the settings of several teachers by where a recipe has them."""
    return {f"teachers.{name}": config for name, config in teachers.items()}


def intersect_capabilities(members: Iterable[Capabilities]) -> Capabilities:
    """What every member that speaks can answer; one that is silent by nature narrows no signal, but writes nothing."""
    everyone = list(members)
    follows = any(member.follows_student for member in everyone)
    speaking = [member for member in everyone if member.signals]
    if not speaking:
        return Capabilities(
            frozenset(), supports=frozenset(), writes=False, follows_student=follows
        )
    return Capabilities(
        signals=frozenset.intersection(*(member.signals for member in speaking)),
        supports=frozenset.intersection(*(member.supports for member in speaking)),
        largest_k=min(
            (member.largest_k for member in speaking if member.largest_k is not None), default=None
        ),
        writes=all(member.writes for member in everyone),
        needs_candidates=any(member.needs_candidates for member in speaking),
        follows_student=follows,
    )


def build_members(configs: Mapping[str, Any], context: TeacherContext) -> dict[str, Teacher]:
    """Build each member from its settings."""
    return {name: context.build(context, config) for name, config in configs.items()}


class TeacherOfMembers(Teacher):
    """A teacher that is several, by name; their states are saved under `name/`."""

    def __init__(self, members: Mapping[str, Teacher]) -> None:
        self._members = members

    def _ask(self, name: str, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return what one member says, under its name; TeacherError where it leaves a rollout out."""
        answers = self._members[name].score(rollouts, signal)
        if len(answers) != len(rollouts):
            raise TeacherError(
                f"the teacher {name!r} answered {len(answers)} of {len(rollouts)} rollouts; every rollout needs an answer"
            )
        return [
            replace(answer, name=f"{name}/{answer.name}" if answer.name else name)
            for answer in answers
        ]

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Pass it on to each."""
        for teacher in self._members.values():
            teacher.after_step(step, data)

    def save_state(self) -> dict[str, Tensor]:
        """The tensors of each, under its name."""
        return {
            f"{name}/{key}": tensor
            for name, teacher in self._members.items()
            for key, tensor in teacher.save_state().items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Give each what it saved."""
        for name, teacher in self._members.items():
            prefix = f"{name}/"
            teacher.load_state(
                {
                    key.removeprefix(prefix): tensor
                    for key, tensor in tensors.items()
                    if key.startswith(prefix)
                }
            )
