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

FEWEST_ROWS = 512
"""Nor does multiplying fewer rows than this by the head."""


class Prepared:
    """The linear maps of a model as its weights are now; nothing where the machine has no better layout."""

    @torch.no_grad()
    def __init__(self, language_model: LanguageModel, steps: int) -> None:
        body = language_model.model.base_model
        head = language_model.head().pinned()
        worth = steps >= FEWEST_STEPS and not language_model.autocast and _has_better_layout(head.weight)
        layers = [module for module in body.modules() if type(module) is torch.nn.Linear] if worth else []
        self._layers = [(layer, _Product(_laid_out(layer.weight.detach()), _detached(layer.bias))) for layer in layers]
        self.head = prepared_head(head) if worth else head

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


@dataclass(frozen=True, slots=True)
class _Product:
    """`x @ weight.T + bias`, without a gradient."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Float[Tensor, "*s D"]) -> Float[Tensor, "*s V"]:
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")


@dataclass(frozen=True, slots=True)
class PreparedHead(Head):
    """A head that multiplies in the better layout wherever no gradient is asked of it."""

    product: _Product | None = None

    @property
    def in_place(self) -> bool:
        """No: the product is written to memory of its own."""
        return False

    def logits(self, hidden: Float[Tensor, "*s D"], out: Tensor | None = None) -> Float[Tensor, "*s v"]:
        """As `practicum.types.Head.logits`."""
        learns = torch.is_grad_enabled() and (hidden.requires_grad or self.weight.requires_grad)
        if self.product is None or learns or out is not None:
            return Head.logits(self, hidden, out)
        return self.bent(self.product(hidden.to(self.weight.dtype)))


def prepared_head(head: Head) -> Head:
    """The head made ready for products without a gradient; itself where that gains nothing."""
    if not _has_better_layout(head.weight):
        return head
    bias = None if head.bias is None else head.bias[: head.vocab_size].detach()
    product = _Product(_laid_out(head.weight[: head.vocab_size].detach()), bias)
    return PreparedHead(head.weight, head.vocab_size, head.bias, head.scale, head.softcap, product)


def _laid_out(weight: Float[Tensor, "V D"]) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)


def _detached(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _has_better_layout(weight: Tensor) -> bool:
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and platform.machine().lower() in ("x86_64", "amd64") and torch.backends.mkldnn.is_available()
