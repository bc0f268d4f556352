"""Provide a teacher with a fault: it prefers or avoids some tokens in every context, or starts to agree with everything.

`{type: benchmarks.bent_teacher, teacher: {...}, bias: {a: 8.0}, stop: -25.0}`; `agree_from` is a step, `agree_after` a position.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.core.plugins import Plugin
from practicum.models.tensors import SavedTensor
from practicum.objective import Full, Sampled, Signal
from practicum.ports import (
    Capabilities,
    PromptedClient,
    Teacher,
    TeacherConfig,
    TeacherContext,
    TeacherRequest,
)
from practicum.text import Renderer
from practicum.types import Datum, HeadLike, Prompt, Rollout, Sample, SamplingParams, TeacherSignal


class Config(TeacherConfig):
    """The teacher that is bent, and how."""

    type: Literal["benchmarks.bent_teacher"] = "benchmarks.bent_teacher"
    teacher: Plugin("teachers", TeacherConfig)  # type: ignore[valid-type]
    bias: dict[str, float] = Field(default_factory=dict)
    stop: float = 0.0
    agree_from: int | None = None
    agree_after: int = 8

    def capabilities(self) -> Capabilities:
        """Return the teacher's capabilities, or only the sampled token if the teacher is set to agree."""
        capabilities = self.teacher.capabilities()
        return (
            capabilities
            if self.agree_from is None
            else replace(capabilities, signals=frozenset({"sampled"}))
        )


def build(config: Config, context: TeacherContext) -> Teacher:
    """Build the teacher and bend it."""
    return Bent(config, context.build(config.teacher, "teacher"), context.renderer)


class BentHead:
    """A head with a bias on its logits in every context; see `practicum.types.HeadLike`."""

    def __init__(self, head: HeadLike, bias: Float[Tensor, " v"]) -> None:
        self._head = head
        self._bias = bias

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        return self._head.vocab_size

    @property
    def key(self) -> tuple[int, ...]:
        """The key of the wrapped head."""
        return self._head.key

    def logprobs(self, hidden: Float[Tensor, "*s D"]) -> Float[Tensor, "*s v"]:
        """Log-probabilities of the tokens."""
        return torch.log_softmax(self.logits(hidden), dim=-1)

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """The logits of the head inside, and the bias."""
        return self._head.logits(hidden, room) + self._bias

    def release(self) -> None:
        """Let the head inside go."""
        self._head.release()


class Bent(Teacher):
    """See `practicum.ports.Teacher`."""

    def __init__(self, config: Config, teacher: Teacher, renderer: Renderer) -> None:
        self._config = config
        self._teacher = teacher
        self._bias = {
            renderer.tokenizer.encode(letter)[-1]: value for letter, value in config.bias.items()
        }
        self._bias |= {token: config.stop for token in renderer.stop_ids if config.stop}
        self._step = 1

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities that follow from the settings."""
        return self._config.capabilities()

    def score(self, rollouts: Sequence[Rollout], signal: Signal) -> list[TeacherSignal]:
        """The teacher's scores with the fault in them."""
        if self._config.agree_from is not None:
            return [
                self._make_agree(*pair)
                for pair in zip(rollouts, self._teacher.score(rollouts, Sampled()), strict=True)
            ]
        return [self._bend(scores) for scores in self._teacher.score(rollouts, Full())]

    def _bend(self, scores: TeacherSignal) -> TeacherSignal:
        if scores.head is None:
            return scores
        bias = torch.zeros(scores.head.vocab_size)
        for token, value in self._bias.items():
            bias[token] = value
        return replace(scores, head=BentHead(scores.head, bias))

    def _make_agree(self, rollout: Rollout, scores: TeacherSignal) -> TeacherSignal:
        assert scores.logprobs is not None and self._config.agree_from is not None
        late = torch.arange(len(rollout.tokens)) >= self._config.agree_after
        agrees = late & (self._step >= self._config.agree_from)
        return TeacherSignal(logprobs=torch.where(agrees, rollout.policy_logprobs, scores.logprobs))

    def sample(
        self, requests: Sequence[TeacherRequest], params: SamplingParams
    ) -> list[Sample] | None:
        """The teacher's own answers, which have no fault."""
        return self._teacher.sample(requests, params)

    def bind_prompt(self, prompt: Prompt) -> PromptedClient | None:
        """The teacher's."""
        return self._teacher.bind_prompt(prompt)

    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Count the steps."""
        self._step = step + 1
        self._teacher.after_step(step, data)

    def save_state(self) -> Mapping[str, SavedTensor]:
        """The teacher's."""
        return self._teacher.save_state()

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """The teacher's."""
        self._teacher.load_state(tensors)
