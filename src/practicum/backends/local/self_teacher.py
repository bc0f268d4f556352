"""The student as its own teacher: the same modules, with another set of the weights that learn.

Only the trainable weights are held twice, so a self-teacher of a LoRA student costs the adapters and nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.sampler import LocalSampler
from practicum.ports import Capabilities, WeightUpdateRule
from practicum.types import Datum


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSelfTeacher(LocalSampler):
    """Scores with weights that follow the student's by a rule; see `practicum.ports.SelfTeacher`.

    `overlay` are the weights that stand in for the student's; none where they are live.
    """

    rule: WeightUpdateRule

    @classmethod
    def of(
        cls,
        language_model: LanguageModel,
        rule: WeightUpdateRule,
        batch_size: int,
        chunk_tokens: int,
    ) -> "LocalSelfTeacher":
        """Begin with the student's weights of now."""
        rule = rule.hold_within_step()
        learning = {} if rule.weights == "live" else language_model.trainable_parameters()
        overlay = {name: parameter.detach().clone() for name, parameter in learning.items()}
        return cls(language_model, overlay, batch_size, chunk_tokens, rule=rule)

    @property
    def capabilities(self) -> Capabilities:
        """Everything, at its own step: the modules are the student's."""
        return replace(super(LocalSelfTeacher, self).capabilities, follows_student=True)

    @torch.no_grad()
    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Follow the student: an average for `ema`, a copy every so many steps for `periodic`."""
        student, rule = self.language_model.trainable_parameters(), self.rule
        for name, held in self.overlay.items():
            if rule.weights == "ema":
                held.lerp_(student[name], rule.rate)
            elif rule.weights == "periodic" and step % rule.period == 0:
                held.copy_(student[name])

    def save_state(self) -> dict[str, Tensor]:
        """The held weights, where they moved since the start."""
        return dict(self.overlay) if self.rule.weights in ("ema", "periodic") else {}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the held weights."""
        for name, held in self.overlay.items():
            if name in tensors:
                held.copy_(tensors[name])
