"""A model's linear maps laid out for multiplying a few rows at a time, as decoding does.

With eight rows a product is bound by reading the weights; oneDNN reads them three times faster in its own layout than in ours
(`python -m benchmarks sizes`). Laying them out costs about as much as ten products, so it is done once for all that is sampled
between two updates.
"""

import inspect
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.language_model import LanguageModel, find_body, patch_forwards
from practicum.functional.head import Head

ROWS = 32
"""For how many rows the layout is chosen; it serves fewer and more."""

MIN_DECODE_STEPS = 8
"""Decoding fewer tokens than this does not repay the laying out."""

MIN_HEAD_ROWS = 512
"""Nor does multiplying fewer rows than this by the head."""


class PrepackedModel:
    """The linear maps of a model as its weights are now; nothing where the machine has no better layout."""

    @torch.no_grad()
    def __init__(self, language_model: LanguageModel, steps: int) -> None:
        # Decoding multiplies few rows at a time, so reading the weights is what it waits for, and oneDNN reads its own layout about
        # three times faster. The layout costs about ten products, which enough tokens must repay. The copies have no gradient and
        # are worth nothing after the next optimizer step: they serve sampling and, for the head, the closed-form loss.
        body = find_body(language_model.model)
        head = language_model.head().pinned()
        should_prepack = (
            steps >= MIN_DECODE_STEPS and not language_model.autocast and _can_prepack(head.weight)
        )
        maps = _linear_maps(body) if should_prepack else ()
        self._forwards: dict[torch.nn.Module, Callable[[Tensor], Tensor]] = {
            layer: _Product(_prepack(weight), bias) for layer, weight, bias in maps
        }
        self._forwards.update(_norms(body) if should_prepack else ())
        self.head = prepack_head(head) if should_prepack else head

    def use(self) -> AbstractContextManager[None]:
        """Within the block the model multiplies with these; training is not possible in it."""
        return patch_forwards(self._forwards)


@dataclass(frozen=True, slots=True)
class _Product:
    """`x @ weight.T + bias`, without a gradient."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Float[Tensor, "*s D"]) -> Float[Tensor, "*s V"]:
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")


@dataclass(frozen=True, slots=True)
class PrepackedHead(Head):
    """A head that multiplies in the better layout wherever no gradient is asked of it."""

    product: _Product | None = None

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """As `practicum.types.HeadLike`: the product is written to memory of its own."""
        learns = (
            room is None
            and torch.is_grad_enabled()
            and (hidden.requires_grad or self.weight.requires_grad)
        )
        if self.product is None or learns:
            return Head.logits(self, hidden, room)
        return self.scaled_and_capped(self.product(hidden.to(self.weight.dtype)))


def prepack_head(head: Head) -> Head:
    """The head made ready for products without a gradient; itself where that gains nothing."""
    if not _can_prepack(head.weight):
        return head
    bias = None if head.bias is None else head.bias[: head.vocab_size].detach()
    product = _Product(_prepack(head.weight[: head.vocab_size].detach()), bias)
    return PrepackedHead(head.weight, head.vocab_size, head.bias, head.scale, head.softcap, product)


def _linear_maps(body: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Tensor, Tensor | None]]:
    """The linear maps with their weights and biases; those with adapters as one map, the adapters added to the weight."""
    adapted = any(".lora_A." in name for name, _ in body.named_parameters())
    within: set[torch.nn.Module] = set()
    if adapted:
        from peft.tuners.lora import Linear

        for layer in body.modules():
            if isinstance(layer, Linear) and not layer.lora_variant:
                base = layer.get_base_layer()
                if not isinstance(
                    base, torch.nn.Linear
                ):  # a map whose weight lies the other way round
                    continue
                within.update(layer.modules())
                deltas = [layer.get_delta_weight(adapter) for adapter in layer.active_adapters]
                yield (
                    layer,
                    base.weight.detach() + sum(deltas),
                    None if base.bias is None else base.bias.detach(),
                )
    for layer in body.modules():
        if type(layer) is torch.nn.Linear and layer not in within:
            yield layer, layer.weight.detach(), None if layer.bias is None else layer.bias.detach()


def _norms(body: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Callable[[Tensor], Tensor]]]:
    """The root mean square norms as one operation instead of six, where a trial shows that they are that.

    Only those that are called with hidden states alone: a gated norm, which takes a gate too, is another function.
    """
    for layer in body.modules():
        epsilon = vars(layer).get("variance_epsilon")
        weights = list(layer.parameters(recurse=False))
        if (
            epsilon is not None
            and len(weights) == 1
            and len(inspect.signature(layer.forward).parameters) == 1
        ):
            norm = partial(
                torch.nn.functional.rms_norm,
                normalized_shape=weights[0].shape,
                weight=weights[0].detach(),
                eps=epsilon,
            )
            trial = torch.linspace(-1.0, 2.0, 3 * weights[0].numel()).view(3, -1)
            if torch.allclose(norm(trial), layer(trial), rtol=1e-5, atol=1e-6):
                yield layer, norm


def _prepack(weight: Float[Tensor, "V D"]) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)


def _can_prepack(weight: Tensor) -> bool:
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return (
        plain
        and platform.machine().lower() in ("x86_64", "amd64")
        and torch.backends.mkldnn.is_available()
    )
