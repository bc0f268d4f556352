"""The common part of a route and a pool: several teachers under their names."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from torch import Tensor

from practicum.core.plugins import Plugin
from practicum.errors import TeacherError
from practicum.models.tensors import SavedTensor
from practicum.objective import NO_CAPABILITIES, Signal
from practicum.ports import Capabilities, Teacher, TeacherConfig, TeacherContext
from practicum.types import Datum, PooledSignal, Rollout, TeacherSignal

_NAME = re.compile(r"[A-Za-z0-9_-]+")


def _check_names(teachers: dict[str, Any]) -> dict[str, Any]:
    """Return the members; ValueError if there are none, or if a name is invalid for tensors."""
    if not teachers:
        raise ValueError("no teacher is named; write `teachers: {math: {...}, code: {...}}`")
    for name in teachers:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} cannot name a teacher; write letters, digits, '_' and '-'")
    return teachers


MemberConfigs = Annotated[
    dict[str, Plugin("teachers", TeacherConfig)], AfterValidator(_check_names)
]
"""The type of a recipe field for the settings of several teachers by name."""


def place_members(teachers: Mapping[str, TeacherConfig]) -> dict[str, TeacherConfig]:
    """Return the settings of several teachers by their place in a recipe."""
    return {f"teachers.{name}": config for name, config in teachers.items()}


def intersect_capabilities(members: Iterable[Capabilities]) -> Capabilities:
    """Return what all members can answer.

    A member without any signal does not narrow the other members' signals, but it cannot generate.
    """
    everyone = list(members)
    follows = any(member.follows_student for member in everyone)
    scoring = [member for member in everyone if member.signals]
    if not scoring:
        return replace(NO_CAPABILITIES, follows_student=follows)
    limits = [member.largest_k for member in scoring if member.largest_k is not None]
    return Capabilities(
        signals=frozenset.intersection(*(member.signals for member in scoring)),
        supports=frozenset.intersection(*(member.supports for member in scoring)),
        largest_k=min(limits, default=None),
        writes=all(member.writes for member in everyone),
        needs_candidates=any(member.needs_candidates for member in scoring),
        follows_student=follows,
        by_span=any(member.by_span for member in scoring),
        repeats_scores=any(member.repeats_scores for member in scoring),
        raw_logits=all(member.raw_logits for member in scoring),
        splits_answers=any(member.splits_answers for member in scoring),
    )


def pool_capabilities(members: Capabilities, kind: str) -> Capabilities:
    """Return the pool's capabilities if all members have these capabilities."""
    signals = members.signals
    if kind == "arithmetic" and members.by_span:
        # Averaged span probabilities do not determine a token's probability; distributions do.
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


def pool_answers(
    answers: Sequence[TeacherSignal],
    weights: Sequence[float],
    kind: Literal["geometric", "arithmetic", "sum"],
    gate: float | None = None,
) -> TeacherSignal:
    """Return the pool of the answers that are not empty; they share the other answers' weight.

    The signal is empty if all answers are.
    """
    weighted = [
        (weight, answer)
        for weight, answer in zip(weights, answers, strict=True)
        if not answer.is_empty
    ]
    if not weighted:
        return TeacherSignal()
    # The weights keep their sum, so that a missing answer does not lower the loss.
    scale = sum(weights) / sum(weight for weight, _ in weighted)
    shares = tuple(weight * scale for weight, _ in weighted)
    members = tuple(answer for _, answer in weighted)
    return TeacherSignal(pool=PooledSignal(kind, shares, members, gate))


def build_members(configs: Mapping[str, Any], context: TeacherContext) -> dict[str, Teacher]:
    """Build each member from its settings."""
    return {name: context.build(config, member=name) for name, config in configs.items()}


class TeacherOfMembers(Teacher):
    """A teacher with several members by name; their states are saved under `name/`."""

    def __init__(self, members: Mapping[str, Teacher]) -> None:
        self._members = members

    def _ask(self, name: str, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return one member's signals, named after it; TeacherError if it omits a rollout."""
        answers = self._members[name].score(rollouts, signal)
        if len(answers) != len(rollouts):
            raise TeacherError(
                f"the teacher {name!r} answered {len(answers)} of {len(rollouts)} rollouts; every "
                "rollout needs an answer"
            )
        return [
            replace(answer, name=f"{name}/{answer.name}" if answer.name else name)
            for answer in answers
        ]

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Update every member."""
        for teacher in self._members.values():
            teacher.after_step(step, data)

    def save_state(self) -> Mapping[str, SavedTensor]:
        """Return the tensors of every member, under its name."""
        return {
            f"{name}/{key}": tensor
            for name, teacher in self._members.items()
            for key, tensor in teacher.save_state().items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of every member."""
        states: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in tensors.items():
            name, _, tensor_name = key.partition("/")
            states[name][tensor_name] = tensor
        for name, teacher in self._members.items():
            teacher.load_state(states[name])
