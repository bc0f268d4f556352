"""Keep the keys and values of texts in pages, so that a text takes memory as it grows.

A page holds the keys and values of `page_tokens` tokens of one text, in every layer. Page 0 belongs
to nobody: rows without a text write into it.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from practicum.backends.local.decode_step import LayerStates


class PagePool:
    """The pages of a decode batch: a store of each layer that grows, and the list of free pages.

    Keys and values of a layer are [P, page_tokens, G, d].
    """

    def __init__(
        self,
        layers: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        page_tokens: int,
        most_pages: int,
    ) -> None:
        self.page_tokens = page_tokens
        self.version = 0
        """Rises when the stores move to other addresses."""
        self._most = most_pages + 1
        self._free: list[int] = []
        # Zeros, not empty memory: a key that is hidden still meets a weight of 0, and 0 times a
        # number that is none is none.
        empty = torch.zeros(1, page_tokens, *shape, dtype=dtype, device=device)
        self.keys = [empty.clone() for _ in range(layers)]
        self.values = [empty.clone() for _ in range(layers)]

    @property
    def page_bytes(self) -> int:
        """The bytes of a page in all layers."""
        return sum(store[0].nbytes for store in (*self.keys, *self.values))

    def count_pages(self, tokens: int) -> int:
        """Return how many pages so many tokens take."""
        return -(-tokens // self.page_tokens)

    def reserve(self, count: int) -> None:
        """Grow until so many pages are free.

        The stores at least double, so that they move seldom, but never beyond the most pages that
        the texts of this batch can take.
        """
        pages = len(self.keys[0])
        lacking = count - len(self._free)
        if lacking <= 0:
            return
        grown = max(min(2 * pages, self._most), pages + lacking)
        # Layer by layer: the old store of one layer alone lives beside the new ones.
        for stores in (self.keys, self.values):
            for layer, store in enumerate(stores):
                stores[layer] = store.new_zeros(grown, *store.shape[1:])
                stores[layer][:pages] = store
        self._free += range(pages, grown)
        self.version += 1

    def take(self, count: int) -> list[int]:
        """Return the numbers of some free pages; there must be as many."""
        numbers, self._free = self._free[:count], self._free[count:]
        assert len(numbers) == count, "pages are reserved before they are taken"
        return numbers

    def give_back(self, pages: Sequence[int]) -> None:
        """Free pages."""
        self._free += pages

    def store_prompt(
        self,
        pages: Sequence[int],
        states: Mapping[int, LayerStates],
        indices: Int[Tensor, " L"],
    ) -> None:
        """Put a prompt's keys and values into its pages: those of all layers, at some indices."""
        steps = torch.arange(len(indices), device=indices.device)
        numbers = torch.tensor(pages, device=indices.device)
        cells = numbers[steps // self.page_tokens] * self.page_tokens + steps % self.page_tokens
        for layer, (keys, values) in states.items():
            self.keys[layer].flatten(0, 1).index_copy_(0, cells, keys[indices].to(self.dtype))
            self.values[layer].flatten(0, 1).index_copy_(0, cells, values[indices].to(self.dtype))

    def read_text(self, pages: Sequence[int], length: int) -> dict[int, LayerStates]:
        """Return a copy of the keys and values of a text in some pages, by layer."""
        return {
            layer: (keys[pages].flatten(0, 1)[:length], values[pages].flatten(0, 1)[:length])
            for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True))
        }

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values: that of the products."""
        return self.keys[0].dtype
