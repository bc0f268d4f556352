"""Nobody scores: for objectives that learn from rewards or from given answers alone."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from practicum.objective import Signal
from practicum.ports import Capabilities, Teacher, TeacherContext, TeacherRequest, Voice
from practicum.types import Prompt, Rollout, Sample, SamplingParams, TeacherSignal

NOTHING = Capabilities(signals=frozenset(), supports=frozenset(), writes=False, follows_student=False)
"""What silence can answer."""


class Config(BaseModel):
    """Nothing to set."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    type: Literal["none"] = "none"

    def capabilities(self) -> Capabilities:
        """No signal at all."""
        return NOTHING


class Silence:
    """Says nothing about any rollout; see `practicum.ports.Teacher`."""

    @property
    def capabilities(self) -> Capabilities:
        """No signal at all."""
        return NOTHING

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """One empty signal a rollout."""
        return [TeacherSignal() for _ in rollouts]

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample] | None:
        """Nobody answers."""
        return None

    def voice(self, prompt: Prompt) -> Voice | None:
        """Nobody writes."""
        return None

    def after_step(self, step: int) -> None:
        """Nothing changes."""

    def save_state(self) -> dict[str, Tensor]:
        """Nothing to save."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing was saved."""


def build(config: Config, context: TeacherContext) -> Teacher:
    """Silence needs nothing of a run."""
    return Silence()
