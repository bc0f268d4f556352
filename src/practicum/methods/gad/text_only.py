"""Use only a teacher's text (the control arm for black-box methods)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from practicum.core.plugins import Plugin
from practicum.errors import CapabilityError
from practicum.ports import (
    Capabilities,
    PromptedClient,
    Teacher,
    TeacherConfig,
    TeacherContext,
    TeacherRequest,
)
from practicum.teaching.chat import PromptWriter
from practicum.teaching.client import FollowerTeacher, SilentTeacher, rewrite_sample
from practicum.text import Renderer
from practicum.types import Prompt, Sample, SamplingParams


class Config(TeacherConfig):
    """The settings of the inner teacher."""

    type: Literal["text_only"] = "text_only"
    teacher: Plugin("teachers", TeacherConfig) = Field(  # type: ignore[valid-type]
        description="the teacher that writes: a `model`, a `self` or a `privileged` teacher"
    )

    def capabilities(self) -> Capabilities:
        """Return the inner teacher's capabilities without its signals."""
        return _silence(self.teacher.capabilities())


def _silence(capabilities: Capabilities) -> Capabilities:
    return replace(capabilities, signals=frozenset(), supports=frozenset(), largest_k=0)


def build(config: Config, context: TeacherContext) -> Teacher:
    """Build the inner teacher; CapabilityError if it writes nothing."""
    inner = context.build(config.teacher)
    if not inner.capabilities.writes:
        raise CapabilityError(
            f"text_only: the inner teacher, {config.teacher.type!r}, writes no answers; use a "
            "teacher that writes, such as {type: model, model: ...}"
        )
    return TextOnlyTeacher(inner, context.renderer, context.is_dry_run)


class TextOnlyTeacher(SilentTeacher, FollowerTeacher):
    """The teacher's text in the student's tokens, without probabilities.

    `is_on_paper` is True in a plan, where answers have a length but no text.
    """

    def __init__(self, inner: Teacher, renderer: Renderer, is_on_paper: bool) -> None:
        self._inner = self._follower = inner
        self._renderer = renderer
        self._is_on_paper = is_on_paper

    @property
    def capabilities(self) -> Capabilities:
        """The inner teacher's capabilities without its signals."""
        return _silence(self._inner.capabilities)

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        """Return the teacher's completions, tokenized again from their text."""
        samples = self._inner.sample(requests, params)
        if samples is None or self._is_on_paper:
            return samples
        return [
            rewrite_sample(sample, request.prompt, self._renderer, self._renderer, params)
            for sample, request in zip(samples, requests, strict=True)
        ]

    def bind_prompt(self, prompt: Prompt) -> PromptedClient:
        """Return the teacher as a client bound to this prompt."""
        prompt_tokens = self._renderer.render(prompt.messages)
        return PromptedClient(PromptWriter(self, prompt), prompt_tokens, accepts_tokens=False)
