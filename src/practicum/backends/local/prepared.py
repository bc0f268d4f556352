"""Prepack a model's linear maps in oneDNN's layout, for multiplying a few rows at a time.

Maps are prepacked once for all samples between two updates, and only if there are enough tokens to
repay the cost. The prepacked maps of a frozen model are kept.
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

from practicum.backends.local.language_model import LanguageModel, find_decoder, patch_forwards
from practicum.backends.local.pages import page_out
from practicum.backends.local.processor import is_amd
from practicum.backends.local.quantising import has_fewer_bits
from practicum.functional.head import Head

ROWS = 32
"""The number of rows for which the layout is chosen; it also works for fewer and more rows."""

MIN_DECODE_STEPS = 8
"""Decoding fewer tokens than this does not repay prepacking."""

MIN_HEAD_ROWS = 512
"""Multiplying fewer rows than this by the head does not repay prepacking it."""


MIN_KEPT_WEIGHTS, MAX_KEPT_BYTES = 2**20, 2**30
"""The minimum weights of a frozen model that gains from the layout, and the maximum bytes kept."""

ROW_STEP = 64
"""Larger numbers of rows are padded to a multiple of this number."""

Product = Callable[[Tensor], Tensor]
"""The product of rows with a weight, plus its bias if it has one."""

Pack = Callable[[Tensor, Tensor | None], Product]
"""Return the product with a copy of a weight and its bias."""


class PrepackedMaps:
    """A copy of some modules' current linear maps in oneDNN's layout; empty if that is not faster.

    `pack` may copy the maps in another layout for another product.
    """

    @torch.no_grad()
    def __init__(
        self, body: torch.nn.Module, head: Head, steps: int, pack: Pack | None = None
    ) -> None:
        # Decoding multiplies a few rows at a time and is limited by reading the weights; at eight
        # rows oneDNN reads its own layout about three times faster (`python -m benchmarks sizes`).
        # Reordering costs as much as about ten products, so it needs enough tokens to pay off. The
        # copies carry no gradient and expire with the next optimizer step: they serve sampling and,
        # for the head, the closed-form loss.
        head = head.detached()
        should_prepack = steps >= MIN_DECODE_STEPS and _can_prepack(head.weight)
        maps = list_linear_maps(body) if should_prepack else ()
        self._forwards: dict[torch.nn.Module, Product] = {
            layer: (pack or _reorder)(weight, bias)
            for layer, weight, bias in maps
            if weight.data_ptr() != head.weight.data_ptr()
        }
        self._forwards.update(_find_norms(body) if should_prepack else ())
        self.head = prepack_head(head, pack or _reorder) if should_prepack else head

    def use(self) -> AbstractContextManager[None]:
        """Compute with the prepacked maps within the block; training is not possible in it."""
        return patch_forwards(self._forwards)


class PrepackedModel(PrepackedMaps):
    """A copy of a language model's maps and head."""

    def __init__(self, language_model: LanguageModel, steps: int) -> None:
        body, head = find_decoder(language_model.model), language_model.head()
        super().__init__(body, head, 0 if language_model.autocast else steps)


class LayoutStore:
    """Hold the prepacked maps of one model; its weights must not change.

    With `owns_weights`, the store is the only reader of the weights and returns their pages to the
    system.

    Scoring multiplies hundreds of rows at a time. Reordering then costs as much as about 300 rows,
    which pays off in the first steps of a frozen model.
    """

    def __init__(self, owns_weights: bool = False) -> None:
        self._owns_weights = owns_weights
        self._prepacked: PrepackedModel | None = None

    def open(self, language_model: LanguageModel) -> PrepackedModel:
        """Return the model's maps, which the first call prepacks if the layout is faster."""
        if self._prepacked is None:
            steps = MIN_DECODE_STEPS if scores_with_layout(language_model) else 0
            self._prepacked = PrepackedModel(language_model, steps)
            if steps and self._owns_weights:
                page_out(weight.data for weight in language_model.model.parameters())
        return self._prepacked


def scores_with_layout(language_model: LanguageModel) -> bool:
    """Return True if scoring with the model, once frozen, uses oneDNN's layout."""
    layers = _list_linear_layers(find_decoder(language_model.model))
    weights = sum(layer.weight.numel() for layer in layers)
    return count_cached_bytes(weights + language_model.head().weight.numel()) > 0


def count_cached_bytes(weights: int) -> int:
    """Return the bytes that `LayoutStore` keeps for a float32 model with `weights` map weights.

    This is 0 if the layout is not faster for many rows or if the copy is too large.
    """
    # On AMD processors oneDNN takes 0.87 to 0.91 of MKL's time (`python -m benchmarks layout`). On
    # Intel processors both are equally fast. A tiny model loses more to call overhead than it
    # gains.
    is_repaid = is_amd() and weights >= MIN_KEPT_WEIGHTS
    return 4 * weights if is_repaid and 4 * weights <= MAX_KEPT_BYTES else 0


@dataclass(frozen=True, slots=True)
class _Product:
    """The product `x @ weight.T + bias` with a prepacked weight, without a gradient."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Float[Tensor, "*s D"]) -> Float[Tensor, "*s V"]:
        count = rows.numel() // rows.shape[-1]
        if count <= ROW_STEP:
            return self._multiply(rows)
        # torch compiles a product for each number of rows and keeps up to 1,024 of them, 96 MiB:
        # ragged batches would fill that.
        padded = torch.nn.functional.pad(rows.reshape(count, -1), (0, 0, 0, -count % ROW_STEP))
        return self._multiply(padded)[:count].view(*rows.shape[:-1], -1)

    def _multiply(self, rows: Float[Tensor, "*s D"]) -> Float[Tensor, "*s V"]:
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")


@dataclass(frozen=True, slots=True)
class PrepackedHead(Head):
    """A head that uses its prepacked weight if no gradient is needed."""

    product: Product | None = None

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """Return the logits as `practicum.types.HeadLike` does; the product ignores `room`."""
        can_differentiate = hidden.requires_grad or self.weight.requires_grad
        needs_gradient = room is None and torch.is_grad_enabled() and can_differentiate
        if self.product is None or needs_gradient:
            return Head.logits(self, hidden, room)
        return self.scaled_and_capped(self.product(hidden.to(self.weight.dtype)))


def _reorder(weight: Float[Tensor, "V D"], bias: Tensor | None) -> "_Product":
    return _Product(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS), bias)


def prepack_head(head: Head, pack: Pack = _reorder) -> Head:
    """Return the head with a prepacked weight, or the head itself if the layout is not faster."""
    if head.operand is not None or not _can_prepack(head.weight):
        return head
    bias = None if head.bias is None else head.bias[: head.vocab_size].detach()
    product = pack(head.weight[: head.vocab_size].detach(), bias)
    scale, softcap = head.scale, head.softcap
    return PrepackedHead(head.weight, head.vocab_size, head.bias, scale, softcap, product=product)


def list_linear_maps(
    body: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, Tensor, Tensor | None]]:
    """Yield the linear maps with their weights and biases; adapters are added to the weight."""
    inside_adapters: set[torch.nn.Module] = set()
    if any(".lora_A." in name for name, _ in body.named_parameters()):
        from peft.tuners.lora import Linear

        for layer in body.modules():
            if isinstance(layer, Linear) and not layer.lora_variant:
                base = layer.get_base_layer()
                # Skip GPT-2's Conv1D, which stores its weight transposed.
                if not isinstance(base, torch.nn.Linear):
                    continue
                inside_adapters.update(layer.modules())
                deltas = [layer.get_delta_weight(adapter) for adapter in layer.active_adapters]
                yield layer, base.weight.detach() + sum(deltas), _detach(base.bias)
    for layer in _list_linear_layers(body):
        if layer not in inside_adapters:
            yield layer, layer.weight.detach(), _detach(layer.bias)


def _list_linear_layers(body: torch.nn.Module) -> list[torch.nn.Linear]:
    # A quantized weight has no oneDNN layout.
    return [
        layer
        for layer in body.modules()
        if type(layer) is torch.nn.Linear and not has_fewer_bits(layer.weight)
    ]


def _detach(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach()


def _find_norms(
    body: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, Callable[[Tensor], Tensor]]]:
    """Yield each root mean square norm as one operation instead of six.

    Only norms that take just the hidden states: a gated norm, which also takes a gate, is another
    function.
    """
    # Each model class implements its norm differently, so a trial decides whether it is an RMS
    # norm.
    for layer in body.modules():
        epsilon = vars(layer).get("variance_epsilon")
        if epsilon is None or len(inspect.signature(layer.forward).parameters) != 1:
            continue
        weights = list(layer.parameters(recurse=False))
        if len(weights) == 1:
            norm = partial(
                torch.nn.functional.rms_norm,
                normalized_shape=weights[0].shape,
                weight=weights[0].detach(),
                eps=epsilon,
            )
            trial = torch.linspace(-1.0, 2.0, 3 * weights[0].numel()).view(3, -1)
            if torch.allclose(norm(trial), layer(trial), rtol=1e-5, atol=1e-6):
                yield layer, norm


def _can_prepack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and platform.machine().lower() in ("x86_64", "amd64")
        and torch.backends.mkldnn.is_available()
    )
