"""Compute the attention of packed segments in one flash kernel call, without padding or mask.

The kernel takes the ends of the segments in the row. A segment's keys are its own keys and the keys
of the segments above it, copied into one row. Keys and values of a shared prefix are copied for
every segment below it; its queries are not computed again. The kernel aligns queries with the last
keys, so a segment attends causally to itself and fully to the segments above it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

HAS_KERNEL = torch.__version__ >= "2.11"
"""True if this torch has the kernel with windows, which training needs."""

HAS_PAGES = torch.__version__ >= "2.13"
"""True if the kernel reads pages, which decoding needs, and has a keyword for grouped heads.

Earlier kernels accept fewer key heads than query heads without a keyword.
"""

WIDEST_HEAD = 256
"""The largest head width that flash attention supports."""

CAUSAL = (-1, 0)
"""The window of a query: any number of keys before it, and none after it."""

Kernel = Callable[..., Tensor]
"""A function with the parameters of `torch.nn.attention.varlen.varlen_attn`."""


def can_attend_varlen(
    queries: Float[Tensor, "T H d"], values: Float[Tensor, "T G e"], dropout: float
) -> bool:
    """Return True if the flash kernel supports this attention.

    It needs a CUDA device, 16-bit numbers, the same head width for keys and values, and no dropout.
    """
    width = queries.shape[-1]
    return (
        HAS_KERNEL
        and queries.is_cuda
        and queries.dtype in (torch.float16, torch.bfloat16)
        and width == values.shape[-1] <= WIDEST_HEAD
        and width % 8 == 0
        and dropout == 0.0
    )


@dataclass(frozen=True, slots=True)
class VarlenSegments:
    """The segments of a row: the ends of queries and keys, starting with 0, and maximum lengths.

    `keys` are the row positions of all segments' keys, in the order of the segments. It is None if
    no segment has an ancestor, because then the keys are the row itself.
    """

    keys: Int[Tensor, " K"] | None
    query_ends: Int[Tensor, " S"]
    key_ends: Int[Tensor, " S"]
    longest_queries: int
    longest_keys: int

    @classmethod
    def build(cls, paths: Sequence[Sequence[range]], device: torch.device) -> "VarlenSegments":
        """Build from the row positions of each segment and its ancestors, the segment last."""
        paths = [path for path in paths if path[-1]]
        queries = [len(path[-1]) for path in paths]
        lengths = [sum(map(len, path)) for path in paths]
        keys = None
        if queries != lengths:
            spans = [torch.arange(span.start, span.stop) for path in paths for span in path]
            keys = torch.cat(spans).to(device)

        def place_ends(counts: Sequence[int]) -> Tensor:
            ends = list(accumulate(counts, initial=0))
            return torch.tensor(ends, dtype=torch.int32, device=device)

        longest = max(queries, default=0), max(lengths, default=0)
        return cls(keys, place_ends(queries), place_ends(lengths), *longest)

    def attend(
        self,
        queries: Float[Tensor, "T H d"],
        keys: Float[Tensor, "T G d"],
        values: Float[Tensor, "T G d"],
        scale: float | None,
        kernel: Kernel | None = None,
    ) -> Float[Tensor, "T H d"]:
        """Return the attention output of the row's tokens, with torch's or the given kernel."""
        compute = kernel or load_kernel()
        if self.keys is not None:
            keys, values = keys[self.keys], values[self.keys]
        ends = self.query_ends, self.key_ends, self.longest_queries, self.longest_keys
        if HAS_PAGES:
            compute = partial(compute, enable_gqa=queries.shape[1] != keys.shape[1])
        return compute(queries, keys, values, *ends, scale=scale, window_size=CAUSAL)


def load_kernel() -> Kernel:
    """Import torch's kernel on first use: older versions of torch do not have it."""
    from torch.nn.attention.varlen import varlen_attn

    return cast(Kernel, varlen_attn)
