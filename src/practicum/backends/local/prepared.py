"""A model's linear maps laid out for multiplying a few rows at a time, as decoding does.

With eight rows a product is bound by reading the weights; oneDNN reads them up to three times faster in its own layout than
in ours. Laying them out costs about as much as ten products, so it is done once for all that is sampled between two updates.
"""

import contextlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.language_model import LanguageModel
from practicum.types import Head

ROWS = 32
"""For how many rows the layout is chosen; it serves fewer and more."""

FEWEST_STEPS = 8
"""Decoding fewer tokens than this does not repay the laying out."""


class Prepared:
    """The linear maps of a model as its weights are now; nothing where the machine has no better layout."""

    @torch.no_grad()
    def __init__(self, language_model: LanguageModel, steps: int) -> None:
        body = language_model.model.base_model
        worth = steps >= FEWEST_STEPS and _has_better_layout(language_model)
        layers = [module for module in body.modules() if type(module) is torch.nn.Linear] if worth else []
        self._layers = [(layer, _Product(_laid_out(layer.weight.detach()), _detached(layer.bias))) for layer in layers]
        head = language_model.head()
        pinned = Head(head.weight.detach(), head.vocab_size, _detached(head.bias), head.scale, head.softcap)
        self.head: Head | PreparedHead = PreparedHead(pinned) if worth else pinned

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block the model multiplies with these; training is not possible in it."""
        try:
            for layer, product in self._layers:
                layer.__dict__["forward"] = product  # found on the module itself before its class is asked
            yield
        finally:
            for layer, _ in self._layers:
                layer.__dict__.pop("forward", None)


class PreparedHead:
    """A head in the same layout."""

    def __init__(self, head: Head) -> None:
        bias = None if head.bias is None else head.bias[: head.vocab_size]
        self._head = head
        self._product = _Product(_laid_out(head.weight[: head.vocab_size]), bias)

    @torch.no_grad()
    def logits(self, hidden: Float[Tensor, "B D"]) -> Float[Tensor, "B v"]:
        """As `practicum.types.Head.logits`."""
        return self._head.bent(self._product(hidden))


@dataclass(frozen=True, slots=True)
class _Product:
    """`x @ weight.T + bias`, without a gradient."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Float[Tensor, "*s D"]) -> Float[Tensor, "*s V"]:
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")


def _laid_out(weight: Float[Tensor, "V D"]) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _has_better_layout(language_model: LanguageModel) -> bool:
    plain = language_model.device.type == "cpu" and language_model.model.dtype == torch.float32
    machine = platform.machine().lower() in ("x86_64", "amd64")
    return plain and machine and not language_model.autocast and torch.backends.mkldnn.is_available()
