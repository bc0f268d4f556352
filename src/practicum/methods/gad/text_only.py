"""Use only a teacher's text (the control arm for black-box methods)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field
from torch import Tensor

from practicum.core.plugins import Plugin
from practicum.errors import CapabilityError
from practicum.models.tensors import SavedTensor
from practicum.objective import Signal
from practicum.ports import (
    Capabilities,
    PromptedClient,
    Teacher,
    TeacherConfig,
    TeacherContext,
    TeacherRequest,
)
from practicum.teaching.chat import PromptWriter
from practicum.teaching.client import rewrite_sample
from practicum.text import Renderer
from practicum.types import (
    Datum,
    Prompt,
    Rollout,
    Sample,
    SamplingParams,
    TeacherSignal,
)


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


@dataclass(frozen=True, slots=True)
class TextOnlyTeacher(Teacher):
    """The teacher's text in the student's tokens, without probabilities."""

    teacher: Teacher
    renderer: Renderer
    is_on_paper: bool = False
    """True in a plan, where answers have a length but no text."""

    @property
    def capabilities(self) -> Capabilities:
        """The inner teacher's capabilities without its signals."""
        return _silence(self.teacher.capabilities)

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Return an empty signal for each rollout."""
        return [TeacherSignal() for _ in rollouts]

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        """Return the teacher's completions, tokenized again from their text."""
        samples = self.teacher.sample(requests, params)
        if samples is None or self.is_on_paper:
            return samples
        return [
            rewrite_sample(sample, request.prompt, self.renderer, self.renderer, params)
            for sample, request in zip(samples, requests, strict=True)
        ]

    def bind_prompt(self, prompt: Prompt) -> PromptedClient:
        """Return the teacher as a client bound to this prompt."""
        prompt_tokens = self.renderer.render(prompt.messages)
        return PromptedClient(PromptWriter(self, prompt), prompt_tokens, accepts_tokens=False)

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Notify the inner teacher of a finished step."""
        self.teacher.after_step(step, data)

    def save_state(self) -> Mapping[str, SavedTensor]:
        """Return the state of the inner teacher."""
        return self.teacher.save_state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of the inner teacher."""
        self.teacher.load_state(tensors)
