"""The student as its own teacher: the same modules, with another set of the weights that learn.

Only the trainable weights are held twice, so a self-teacher of a LoRA student costs the adapters and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.sampler import LocalSampler
from practicum.objective import Signal
from practicum.ports import Capabilities, LockstepClient, MixedRequest, Reading, SelfRule
from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest, TeacherSignal


class LocalSelfTeacher:
    """Scores with weights that follow the student's by a rule; see `practicum.ports.SelfTeacher`."""

    def __init__(self, language_model: LanguageModel, rule: SelfRule, batch_size: int, chunk_tokens: int) -> None:
        self._rule = rule
        self._student = language_model.trainable()
        self._held: dict[str, Tensor] = {}
        if rule.weights != "live":
            self._held = {name: parameter.detach().clone() for name, parameter in self._student.items()}
        self._sampler = LocalSampler(language_model, self._held, batch_size, chunk_tokens)

    @property
    def capabilities(self) -> Capabilities:
        """Everything, at its own step: the modules are the student's."""
        return replace(self._sampler.capabilities, follows_student=True)

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Sample]:
        """Sample from the held weights."""
        return self._sampler.sample(requests, params)

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score with the held weights."""
        return self._sampler.score(requests, signal)

    def sample_mixed(
        self, requests: Sequence[MixedRequest], teacher: LockstepClient, share: float, params: SamplingParams
    ) -> list[Sample]:
        """Sample from the held weights and another model at once."""
        return self._sampler.sample_mixed(requests, teacher, share, params)

    def read(self, prompts: Sequence[tuple[int, ...]], rows: int, new_tokens: int) -> Reading:
        """Read with the held weights."""
        return self._sampler.read(prompts, rows, new_tokens)

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Follow the student: an average for `ema`, a copy every so many steps for `periodic`."""
        if self._rule.weights == "ema":
            for name, held in self._held.items():
                held.lerp_(self._student[name], self._rule.rate)
        elif self._rule.weights == "periodic" and step % self._rule.period == 0:
            for name, held in self._held.items():
                held.copy_(self._student[name])

    def save_state(self) -> dict[str, Tensor]:
        """The held weights, where they moved since the start."""
        return dict(self._held) if self._rule.weights in ("ema", "periodic") else {}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the held weights."""
        for name, held in self._held.items():
            if name in tensors:
                held.copy_(tensors[name])
