"""A teacher for tests of judges: it grades by the sum of the digits that it reads, and scores nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from practicum.objective import Capabilities, Signal
from practicum.ports import Teacher, TeacherConfig, TeacherContext, TeacherRequest
from practicum.types import Rollout, Sample, SamplingParams, TeacherSignal

CAN = Capabilities(signals=frozenset(), supports=frozenset(), follows_student=False)


class Config(TeacherConfig):
    """The plug-in has no settings."""

    type: Literal["grading_teacher:Plugin"] = "grading_teacher:Plugin"

    def capabilities(self) -> Capabilities:
        """Return the capabilities of a teacher that only writes text."""
        return CAN


@dataclass(frozen=True, slots=True)
class GradingTeacher(Teacher):
    """A teacher that grades by the sum of digits."""

    capabilities: Capabilities = CAN

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return silent signals."""
        return [TeacherSignal() for _ in rollouts]

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample]:
        """Return one digit for each question."""
        return [_write(request.prompt.messages[-1].content) for request in requests]


def _write(question: str) -> Sample:
    quoted = question.split("> ")[-1].split("\n")[0]
    grade = sum(int(letter) for letter in quoted if letter.isdigit()) % 10
    unknown = torch.full((1,), math.nan)
    return Sample(torch.tensor([0]), torch.zeros(1), unknown, "stop", str(grade))


def build(config: Config, context: TeacherContext) -> Teacher:
    """Return the teacher, which needs no context."""
    return GradingTeacher()


class Plugin:
    """The module as a plug-in: its bare name has no dot."""

    Config = Config
    build = staticmethod(build)
