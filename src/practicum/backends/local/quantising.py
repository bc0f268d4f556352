"""Round the frozen linear maps of a model to fewer bits, except embeddings, norms and the head.

torchao rounds to `int8` and `nf4` and multiplies with its own tensors. `nvfp4` is simulated here:
weights are rounded to the values of the format and stored as before. This saves no memory, but the
scores are the same as from a teacher served with such weights. Activations are not rounded.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from practicum.backends.local.language_model import LanguageModel, find_decoder
from practicum.errors import ModelError, RecipeError, suggest_install
from practicum.models.config import ModelConfig, ScorerConfig, StudentConfig
from practicum.models.quantization import QUANTIZATIONS, QuantizationName

NVFP4_BLOCK = 16
"""The weights that share a scale in NVFP4 (arXiv 2509.25149)."""

E2M1_MAX, E4M3_MAX = 6.0, 448.0
"""The largest numbers of the two formats."""

NF4_BLOCK, NF4_SCALES = 64, 256
"""The weights that share a scale, and the scales that share a second one (arXiv 2305.14314)."""


def quantise(language_model: LanguageModel, config: ModelConfig, source: str) -> None:
    """Round the weights of a model in place if its settings ask for it. Raises ModelError."""
    name = config.quantization if isinstance(config, ScorerConfig | StudentConfig) else None
    if name is None:
        return
    layers = list(_list_layers(language_model, name, source))
    # Weights that two modules share are rounded once and stay shared.
    rounded: dict[int, torch.nn.Parameter] = {}
    replace_weight = ROUNDERS[name]
    for layer in layers:
        weight = layer.weight
        if id(weight) not in rounded:
            tensor = replace_weight(weight.detach())
            rounded[id(weight)] = torch.nn.Parameter(tensor, requires_grad=False)
        layer.weight = rounded[id(weight)]
        if has_fewer_bits(layer.weight) and type(layer).forward is torch.nn.Linear.forward:
            layer.__class__ = PackedLinear


class PackedLinear(torch.nn.Linear):
    """A linear layer with a frozen weight in fewer bits; its inputs receive a gradient."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the weight, plus the bias."""
        return _PackedProduct.apply(input, self.weight, self.bias)  # type: ignore[return-value]


class _PackedProduct(torch.autograd.Function):
    """A product that expands one matrix at a time, in both directions; the graph holds none."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # An attribute, since hooks on saved tensors cannot read a weight of several tensors.
        ctx.weight = weight
        operand = expand_weight(weight).to(rows.dtype) if _is_nf4(weight) else weight
        return torch.nn.functional.linear(rows, operand, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        return gradient @ expand_weight(ctx.weight).to(gradient.dtype), None, None


def expand_weight(weight: Tensor) -> Tensor:
    """Return a weight in the model's own dtype if torchao rounded it; other weights are not copied."""
    if not is_packed(weight):
        return weight
    packed: Any = weight
    if not _is_nf4(weight):
        return packed.dequantize()
    # torchao's own function gives the same numbers and takes three times as long: it looks each
    # half of a byte up separately, with indices of 64 bits.
    codes = torch.arange(256, device=weight.device)
    pairs = packed.nf4[torch.stack((codes >> 4, codes & 15), dim=1)]
    scales = packed.dequantize_scalers(
        packed.quantized_scalers, packed.quantization_factor, packed.scaler_block_size
    )
    values = torch.nn.functional.embedding(packed.quantized_data.int(), pairs)
    return values.view(-1, NF4_BLOCK).mul_(scales[:, None]).view(weight.shape)


def _is_nf4(weight: Tensor) -> bool:
    """Return True if a packed weight has torchao's format of 4 bits."""
    from torchao.quantization import NF4Tensor  # type: ignore[import-not-found]

    return isinstance(weight, NF4Tensor)


def has_fewer_bits(weight: Tensor) -> bool:
    """Return True if a weight consists of several tensors, like torchao's quantized weights."""
    return is_traceable_wrapper_subclass(weight)


def is_packed(weight: Tensor) -> bool:
    """Return True if torchao rounded a weight; a shard consists of tensors too and is not rounded."""
    return has_fewer_bits(weight) and not isinstance(weight, DTensor)


def _list_layers(
    language_model: LanguageModel, name: QuantizationName, source: str
) -> Iterator[torch.nn.Linear]:
    """Yield the body's linear layers; raise ModelError if they cannot be rounded or are few."""
    body, multiple = find_decoder(language_model.model), QUANTIZATIONS[name].multiple_of
    layers = {key: part for key, part in body.named_modules() if isinstance(part, torch.nn.Linear)}
    linear_ids = {id(layer.weight) for layer in layers.values()}
    embeddings = {
        id(weight)
        for part in body.modules()
        if isinstance(part, torch.nn.Embedding)
        for weight in part.parameters()
    }
    matrices = [weight for weight in body.parameters() if weight.ndim >= 2]
    num_kept = sum(w.numel() for w in matrices if id(w) not in linear_ids | embeddings)
    # With experts in one tensor, or GPT-2's transposed maps, rounding the rest would have little
    # effect.
    if num_kept > sum(layer.weight.numel() for layer in layers.values()):
        raise ModelError(
            f"{source}: most of its weights are not in torch linear layers, and quantization "
            "only rounds these; leave quantization out"
        )
    for key, layer in layers.items():
        if layer.weight.numel() % multiple:
            raise ModelError(
                f"{source}: {key} has {layer.weight.numel()} weights, and quantization {name} needs "
                f"a multiple of {multiple}; set quantization: int8"
            )
        yield layer


@torch.no_grad()
def simulate_nvfp4(weight: Float[Tensor, "R C"]) -> Float[Tensor, "R C"]:
    """Round weights to NVFP4: E2M1 values, an E4M3 scale per 16 weights, and one float32 scale.

    The scales are set by the largest weight, and all rounding is to the nearest value, ties to
    even.
    """
    rows, columns = weight.shape
    # Zeros at the end of a row do not change the largest weight of a block.
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % NVFP4_BLOCK))
    blocks = padded.view(rows, -1, NVFP4_BLOCK)
    tensor_scale = (blocks.abs().amax() / (E2M1_MAX * E4M3_MAX)).clamp_min(torch.finfo().tiny)
    scales = blocks.abs().amax(dim=-1, keepdim=True) / E2M1_MAX / tensor_scale
    scales = scales.clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).float() * tensor_scale
    # If the scale of a block rounds to 0, all its values are 0.
    values = _round_to_e2m1(blocks / scales.where(scales > 0, 1.0)) * scales
    return values.view(rows, -1)[:, :columns].to(weight.dtype)


def _round_to_e2m1(values: Tensor) -> Tensor:
    """Round to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with either sign."""
    sizes = values.abs()
    # Steps are 0.5 below 2, 1 below 4, and 2 above; an even multiple has an even mantissa.
    steps = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    return values.sign() * ((sizes / steps).round() * steps).clamp_max(E2M1_MAX)


def _round_to_int8(weight: Tensor) -> Tensor:
    with _quietly():
        from torchao.quantization import (  # type: ignore[import-not-found]
            Int8Tensor,
            PerRow,
        )
    return Int8Tensor.from_hp(weight, PerRow())


def _round_to_nf4(weight: Tensor) -> Tensor:
    with _quietly():
        from torchao.quantization import NF4Tensor  # type: ignore[import-not-found]
    blocks = weight.numel() // NF4_BLOCK
    # A small matrix has fewer scales than the number that share a second scale.
    shared = next(count for count in range(NF4_SCALES, 0, -1) if blocks % count == 0)
    return NF4Tensor.from_tensor(weight, NF4_BLOCK, shared)


ROUNDERS: dict[QuantizationName, Callable[[Tensor], Tensor]] = {
    "int8": _round_to_int8,
    "nf4": _round_to_nf4,
    "nvfp4": simulate_nvfp4,
}
"""The functions that return a weight in each format."""


@contextmanager
def _quietly() -> Iterator[None]:
    """Import torchao without its notes about other devices; raise RecipeError if it is missing."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    except ImportError as error:
        raise RecipeError(
            f"quantization needs the package torchao, which cannot be imported ({error}); "
            f"{suggest_install('quantization')}, or remove quantization (a teacher may have nvfp4 without it)"
        ) from None
    finally:
        logging.disable(before)
