"""Another teacher that sees more than the student: an instruction, worked examples, a solution, a document.

Context is only a way of writing the prompt; the tokens that are scored are the student's own. This one function is the
self-distillation family (OPSD 2601.18734, SDFT 2601.19897, OPCD 2602.12275, CRISP 2603.05433).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from practicum.errors import DataError
from practicum.objective import Signal
from practicum.plugins import Plugin
from practicum.ports import Capabilities, Teacher, TeacherContext, TeacherRequest, Voice
from practicum.types import Message, Prompt, Rollout, Sample, SamplingParams, TeacherSignal

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


class Demonstration(BaseModel):
    """A worked example, shown as an earlier turn."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    prompt: str
    answer: str


class Config(BaseModel):
    """What the teacher sees beyond the student's prompt.

    `reference` is put before the question; `{field}` in it stands for a privileged field of the prompt, and `{answer}`
    for its answer, for example `"A correct solution: {solution}"`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["privileged"] = "privileged"
    teacher: Plugin("teachers") = Field(description="who scores")  # type: ignore[valid-type]
    system: str | None = Field(default=None, description="a system turn: an instruction or a text to know")
    demonstrations: tuple[Demonstration, ...] = ()
    reference: str | None = Field(default=None, description="text before the question, with {field} placeholders")

    @model_validator(mode="after")
    def _sees_more(self) -> "Config":
        if self.system is None and not self.demonstrations and self.reference is None:
            raise ValueError("a privileged teacher needs something to see: system, demonstrations or reference")
        return self

    def capabilities(self) -> Capabilities:
        """Those of the teacher inside."""
        return self.teacher.capabilities()


class PrivilegedTeacher:
    """Rewrites each prompt and hands it to the teacher inside; see `practicum.ports.Teacher`."""

    def __init__(self, inner: Teacher, config: Config) -> None:
        self._inner = inner
        self._config = config

    @property
    def capabilities(self) -> Capabilities:
        """Those of the teacher inside."""
        return self._inner.capabilities

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Score the same tokens after the richer prompt."""
        return self._inner.score(
            [replace(rollout, prompt=with_context(rollout.prompt, self._config)) for rollout in rollouts], signal
        )

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample] | None:
        """What the teacher inside answers to the richer prompt."""
        return self._inner.sample(
            [TeacherRequest(with_context(request.prompt, self._config), request.seed) for request in requests], params
        )

    def voice(self, prompt: Prompt) -> Voice | None:
        """That of the teacher inside, with the richer prompt."""
        return self._inner.voice(with_context(prompt, self._config))

    def after_step(self, step: int) -> None:
        """Pass it on."""
        self._inner.after_step(step)

    def save_state(self) -> dict[str, Tensor]:
        """That of the teacher inside."""
        return self._inner.save_state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """That of the teacher inside."""
        self._inner.load_state(tensors)


def with_context(prompt: Prompt, config: Config) -> Prompt:
    """The prompt as the teacher sees it; DataError where a placeholder's field is missing."""
    own_system = [message for message in prompt.messages if message.role == "system"]
    turns = [message for message in prompt.messages if message.role != "system"]
    system = [Message("system", config.system)] if config.system is not None else own_system
    shown = [
        message
        for example in config.demonstrations
        for message in (Message("user", example.prompt), Message("assistant", example.answer))
    ]
    if config.reference is not None:
        question = turns[-1]
        turns = [*turns[:-1], Message(question.role, f"{_filled(config.reference, prompt)}\n\n{question.content}")]
    return replace(prompt, messages=(*system, *shown, *turns))


def _filled(reference: str, prompt: Prompt) -> str:
    """The reference with each `{field}` replaced once, so that braces in a field's content stay text."""
    fields = {
        name: value for name, value in {"answer": prompt.answer, **prompt.privileged}.items() if value is not None
    }

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in fields:
            raise DataError(
                f"prompt {prompt.id!r} has no field {name!r}, which teacher.reference asks for; add it under 'privileged' in "
                f"the task's rows, or take {{{name}}} out (this prompt has: {', '.join(fields) or 'none'})"
            )
        return fields[name]

    return _PLACEHOLDER.sub(value, reference)


def build(config: Config, context: TeacherContext) -> Teacher:
    """Build the teacher inside and put the context around it."""
    return PrivilegedTeacher(context.build(context, config.teacher), config)
