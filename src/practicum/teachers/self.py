"""The student's own weights score: live, frozen at the start, an average (ema), or copied now and then (periodic)."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from practicum.objective import Signal
from practicum.ports import Capabilities, SelfRule, SelfTeacher, Teacher, TeacherContext, TeacherRequest
from practicum.teachers._client import answer_prompts, score_rollouts
from practicum.text import Renderer
from practicum.types import Rollout, Sample, SamplingParams, TeacherSignal


class Config(BaseModel):
    """How the teacher's weights follow the student's.

    A self-teacher with the student's own context and live weights has nothing to teach; give it privileged context.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["self"] = "self"
    weights: Literal["live", "frozen", "ema", "periodic"] = "frozen"
    rate: float = Field(default=0.05, gt=0, le=1, description="ema: the student's share at each step (SDPO 2601.20802)")
    period: int = Field(default=50, ge=1, description="periodic: steps between copies (CRISP 2603.05433)")

    def capabilities(self) -> Capabilities:
        """The student is local, so every signal is at hand."""
        return Capabilities(signals=frozenset({"sampled", "topk", "full"}))


class OwnWeights:
    """Scores with weights of the student itself; see `practicum.ports.Teacher`."""

    def __init__(self, client: SelfTeacher, renderer: Renderer) -> None:
        self._client = client
        self._renderer = renderer

    @property
    def capabilities(self) -> Capabilities:
        """What the student's backend can answer."""
        return self._client.capabilities

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Score each rollout under the held weights."""
        return score_rollouts(self._client, self._renderer, rollouts, signal)

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample]:
        """What the held weights answer themselves."""
        return answer_prompts(self._client, self._renderer, requests, params)

    def after_step(self, step: int) -> None:
        """Follow the student by the rule."""
        self._client.after_step(step)

    def save_state(self) -> dict[str, Tensor]:
        """The held weights, where a resume cannot recompute them."""
        return self._client.save_state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the held weights."""
        self._client.load_state(tensors)


def build(config: Config, context: TeacherContext) -> Teacher:
    """Hold the student's weights as they are now."""
    rule = SelfRule(weights=config.weights, rate=config.rate, period=config.period)
    return OwnWeights(context.student.self_teacher(rule), context.renderer)
