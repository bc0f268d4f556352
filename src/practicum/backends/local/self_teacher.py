"""Use the student as its own teacher: the same modules with other trainable weights.

Only the trainable weights are copied, so the self-teacher of a LoRA student only costs a copy of
the adapters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from practicum.backends.local.sampler import LocalSampler
from practicum.ports import (
    Capabilities,
    SelfTeacher,
    WeightUpdateRule,
)
from practicum.types import Datum


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSelfTeacher(LocalSampler, SelfTeacher):
    """Score with weights that follow the student's by a rule.

    `overlay` holds the weights that replace the student's; it is empty if they are live.
    """

    rule: WeightUpdateRule

    @property
    def capabilities(self) -> Capabilities:
        """Every signal, but only at the current step: the weights follow the student's."""
        return replace(super(LocalSelfTeacher, self).capabilities, follows_student=True)

    @torch.no_grad()
    def after_step(self, step: int, data: Sequence[Datum]) -> None:
        """Follow the student: move the average (`ema`) or copy its weights (`periodic`)."""
        student, rule = self.language_model.trainable_parameters(), self.rule
        for name, weight in self.overlay.items():
            if rule.weights == "ema":
                weight.lerp_(student[name], rule.rate)
            elif rule.weights == "periodic" and step % rule.period == 0:
                weight.copy_(student[name])

    def save_state(self) -> dict[str, Tensor]:
        """Return the teacher's weights if they changed since the start."""
        return dict(self.overlay) if self.rule.weights in ("ema", "periodic") else {}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the teacher's weights."""
        for name, weight in self.overlay.items():
            if name in tensors:
                weight.copy_(tensors[name])
