"""Attend over texts packed into one row: no padding, and each token sees only its own text.

transformers calls an attention function registered under a name with every keyword that the model
was called with. The function of this module takes a `layout`, which knows which tokens belong
together; without a layout it calls transformers' own function.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "practicum"
"""The name under which this attention function is registered in transformers."""


LayerStates = tuple[Float[Tensor, "T G d"], Float[Tensor, "T G e"]]
"""The keys and values of a layer."""


@dataclass(frozen=True, slots=True)
class PrefixStates:
    """The keys and values of P tokens with which texts begin, by layer."""

    tokens: tuple[int, ...]
    kv_by_layer: Mapping[int, LayerStates]


@runtime_checkable
class AttentionLayout(Protocol):
    """The grouping of a row's tokens: the tokens that each token attends to."""

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "T H d"],
        keys: Float[Tensor, "T G d"],
        values: Float[Tensor, "T G e"],
        scale: float | None,
        dropout: float,
    ) -> Float[Tensor, "T H e"]:
        """Compute the attention output of each of the T tokens of a row.

        H query heads fall into G groups that share keys and values. Values may be narrower than
        keys: e differs from d if attention is latent (DeepSeek).
        """
        ...


def attend(
    queries: Float[Tensor, "B H L d"],
    keys: Float[Tensor, "B G M d"],
    values: Float[Tensor, "B G M e"],
    mask: Float[Tensor, "#B 1 #L M"] | None,
    scale: float | None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
) -> Float[Tensor, "B H L e"]:
    """Compute scaled dot-product attention; `mask` is added to the scores."""
    groups = queries.shape[1] // keys.shape[1]
    # Except on the CPU, only flash kernels accept grouped heads, in 16 bits and without a mask.
    # Other kernels get a copy of the keys and values for each head.
    is_flash = mask is None and queries.dtype in (torch.float16, torch.bfloat16)
    if groups > 1 and queries.device.type != "cpu" and not is_flash:
        keys, values = (heads.repeat_interleave(groups, 1) for heads in (keys, values))
        groups = 1
    return torch.nn.functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=groups > 1,
    )


# The parameters are transformers' interface, and some models call it by keyword.
def _attend_with_layout(  # noqa: PLR0913
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: AttentionLayout | None = None,
    **model_kwargs: Any,  # every model may add keywords
) -> tuple[Tensor, None]:
    states = query, key, value
    if layout is None:
        return sdpa_attention_forward(
            module, *states, attention_mask, dropout=dropout, scaling=scaling, **model_kwargs
        )
    # A packed batch is one row: drop the batch axis and put the tokens before the heads.
    queries, keys, values = (_round_as_autocast(heads[0].transpose(0, 1)) for heads in states)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return layout.attend(layer, queries, keys, values, scaling, dropout)[None], None


def _round_as_autocast(heads: Tensor) -> Tensor:
    """Return the heads in the dtype that autocast would give the attention kernel.

    Norms in float32 return queries and keys in float32, which would take twice the memory in a KV
    store.
    """
    device = heads.device.type
    return (
        heads.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else heads
    )


AttentionInterface.register(NAME, _attend_with_layout)
AttentionMaskInterface.register(NAME, sdpa_mask)
