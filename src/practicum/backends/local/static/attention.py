"""Attend from one new token per row over the row's pages."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum.backends.local.varlen import HAS_PAGES, WIDEST_HEAD, Kernel, load_kernel


@dataclass(frozen=True, slots=True)
class PageTable:
    """The pages of each row, the number of keys that it sees, and the cell of its new token.

    Everything has a fixed shape: `reach` is the number of tokens in P pages.
    """

    pages: Int[Tensor, "B P"]
    blocks: Int[Tensor, "B P"]
    """The pages as 32-bit integers for the flash kernel, like `key_counts` and the ends."""
    key_counts: Int[Tensor, " B"]
    cells: Int[Tensor, " B"]
    reach: int
    ends: Int[Tensor, " E"]
    """The ends of the rows' queries (one query per row), starting with 0."""
    key_ends: Int[Tensor, " E"]
    mask: Bool[Tensor, "B 1 1 M"]

    @classmethod
    def build(
        cls,
        pages: Int[Tensor, "B P"],
        lengths: Int[Tensor, " B"],
        active: Bool[Tensor, " B"],
        page_tokens: int,
    ) -> "PageTable":
        """Build from the rows' pages and lengths; inactive rows write into page 0."""
        reach = pages.shape[1] * page_tokens
        index = (lengths // page_tokens).clamp(max=pages.shape[1] - 1)
        page = pages.gather(1, index[:, None])[:, 0]
        cells = torch.where(active, page * page_tokens + lengths % page_tokens, 0)
        key_counts = torch.where(active, lengths + 1, 1)
        key_ends = torch.nn.functional.pad(key_counts.cumsum(0), (1, 0))
        ends = torch.arange(len(pages) + 1, device=pages.device, dtype=torch.int32)
        places = torch.arange(reach, device=pages.device)
        return cls(
            pages=pages,
            blocks=pages.int(),
            key_counts=key_counts.int(),
            cells=cells,
            reach=reach,
            ends=ends,
            key_ends=key_ends.int(),
            mask=(places < key_counts[:, None])[:, None, None],
        )


Attention = Callable[[Tensor, Tensor, Tensor, PageTable], Tensor]
"""Return [B, H, d] from queries [B, H, d] and a layer's keys and values [P, page_tokens, G, d]."""


def attend_by_mask(
    queries: Float[Tensor, "B H d"],
    keys: Float[Tensor, "A T G d"],
    values: Float[Tensor, "A T G d"],
    table: PageTable,
) -> Float[Tensor, "B H d"]:
    """Attend over copies of the rows' pages, with a mask."""
    states = (store[table.pages].flatten(1, 2).transpose(1, 2) for store in (keys, values))
    # The query heads of one group share a key, so pass them as several queries of one head.
    grouped = queries.unflatten(1, (keys.shape[2], -1))
    output = torch.nn.functional.scaled_dot_product_attention(
        grouped, *states, attn_mask=table.mask
    )
    return output.flatten(1, 2)


def attend_by_flash(
    queries: Float[Tensor, "B H d"],
    keys: Float[Tensor, "A T G d"],
    values: Float[Tensor, "A T G d"],
    table: PageTable,
    kernel: Kernel | None = None,
) -> Float[Tensor, "B H d"]:
    """Attend with torch's flash kernel, which reads only each row's pages, in place."""
    compute = kernel or load_kernel()
    return compute(
        queries,
        keys,
        values,
        table.ends,
        table.key_ends,
        1,
        table.reach,
        enable_gqa=queries.shape[1] != keys.shape[2],
        seqused_k=table.key_counts,
        block_table=table.blocks,
    )


def can_attend_by_flash(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Return True if the flash kernel supports this device, dtype and width."""
    fits = head_width % 8 == 0 and head_width <= WIDEST_HEAD
    return HAS_PAGES and device.type == "cuda" and dtype == torch.bfloat16 and fits
