"""Attention over texts laid end to end in one row: none is padded, and each token sees its own text alone.

transformers lets an attention function be registered under a name, and hands it whatever keyword the model was called with.
Ours takes a `layout`, which knows which tokens belong together; without one it is transformers' own.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "practicum"
"""Under which name transformers knows this function."""


@runtime_checkable
class AttentionLayout(Protocol):
    """Which tokens of a row belong together."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "T H d"],
        key: Float[Tensor, "T G d"],
        value: Float[Tensor, "T G e"],
        scale: float | None,
        dropout: float,
    ) -> Float[Tensor, "T H e"]:
        """What each of the T tokens gathers, with H query heads in G groups that share their keys and values.

        Values may be narrower than keys: e is not d where attention is latent (DeepSeek).
        """
        ...


def attend(
    query: Float[Tensor, "B H L d"],
    key: Float[Tensor, "B G M d"],
    value: Float[Tensor, "B G M e"],
    mask: Float[Tensor, "B 1 #L M"] | None,
    scale: float | None,
    *,
    dropout: float = 0.0,
    causal: bool = False,
) -> Float[Tensor, "B H L e"]:
    """Scaled dot-product attention; `mask` is added to the scores. Values may be of another width than keys."""
    shared = query.shape[1] != key.shape[1]
    if (
        shared and query.device.type != "cpu"
    ):  # the fast kernels there take groups or a mask, not both
        groups = query.shape[1] // key.shape[1]
        key, value, shared = (
            key.repeat_interleave(groups, 1),
            value.repeat_interleave(groups, 1),
            False,
        )
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=shared,
    )


def _attention(  # noqa: PLR0913 - transformers' interface
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: AttentionLayout | None = None,
    **others: Any,  # every model may add keywords of its own
) -> tuple[Tensor, None]:
    if layout is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    row = (part[0].transpose(0, 1) for part in (query, key, value))
    return layout.attend(int(module.layer_idx), *row, scaling, dropout)[None], None  # type: ignore[arg-type]


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
