"""Another model scores: a folder, a hub name or a packaged model whose vocabulary is the student's."""

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from practicum.model_config import ModelConfig
from practicum.objective import Signal
from practicum.ports import Capabilities, SamplingClient, Teacher, TeacherContext, TeacherRequest
from practicum.teachers._client import answer_prompts, score_rollouts
from practicum.text import Renderer
from practicum.types import Rollout, Sample, SamplingParams, TeacherSignal


class Config(ModelConfig):
    """The model that scores; its chat template, stop tokens and thinking mode are its own."""

    type: Literal["model"] = "model"

    def capabilities(self) -> Capabilities:
        """A local model gives every signal."""
        return Capabilities(signals=frozenset({"sampled", "topk", "full"}))


class ModelTeacher:
    """Scores with a fixed model; see `practicum.ports.Teacher`."""

    def __init__(self, client: SamplingClient, renderer: Renderer) -> None:
        self._client = client
        self._renderer = renderer

    @property
    def capabilities(self) -> Capabilities:
        """What the model's client can answer."""
        return self._client.capabilities

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """Score each rollout under this model."""
        return score_rollouts(self._client, self._renderer, rollouts, signal)

    def sample(self, requests: Sequence[TeacherRequest], params: SamplingParams) -> list[Sample]:
        """The model's own answers."""
        return answer_prompts(self._client, self._renderer, requests, params)

    def after_step(self, step: int) -> None:
        """A fixed model does not change."""

    def save_state(self) -> dict[str, Tensor]:
        """A fixed model has nothing to save."""
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing was saved."""


def build(config: Config, context: TeacherContext) -> Teacher:
    """Load the model and check that it speaks the student's vocabulary."""
    return ModelTeacher(*context.load_model(config))
