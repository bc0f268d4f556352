"""Keep the keys and values of texts in pages, so that a text only takes memory as it grows.

A page holds the keys and values of `page_tokens` tokens of one text, in every layer. Page 0 belongs
to no text: rows without a text write into it.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from practicum.backends.local.decode_step import LayerStates


class PagePool:
    """The pages of a decode batch: a growing store per layer, and the list of free pages.

    The keys and the values of a layer have the shape [P, page_tokens, G, d].
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
        """A counter that increases when the stores move to other addresses."""
        self._most = most_pages + 1
        self._free: list[int] = []
        # Use zeros instead of uninitialized memory: masked values are multiplied by a weight of 0,
        # and 0 times NaN is NaN.
        empty = torch.zeros(1, page_tokens, *shape, dtype=dtype, device=device)
        self.keys = [empty.clone() for _ in range(layers)]
        self.values = [empty.clone() for _ in range(layers)]

    @property
    def page_bytes(self) -> int:
        """The bytes of a page in all layers."""
        return sum(store[0].nbytes for store in (*self.keys, *self.values))

    def count_pages(self, tokens: int) -> int:
        """Return the number of pages for `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def reserve(self, count: int) -> None:
        """Grow until `count` pages are free.

        The stores at least double, so that they rarely move, but never exceed the number of pages
        that the texts of this batch can take.
        """
        pages = len(self.keys[0])
        lacking = count - len(self._free)
        if lacking <= 0:
            return
        grown = max(min(2 * pages, self._most), pages + lacking)
        # Grow layer by layer: the old store of only one layer exists next to the new stores.
        for stores in (self.keys, self.values):
            for layer, store in enumerate(stores):
                stores[layer] = store.new_zeros(grown, *store.shape[1:])
                stores[layer][:pages] = store
        self._free += range(pages, grown)
        self.version += 1

    def take(self, count: int) -> list[int]:
        """Take free pages and return their numbers; at least `count` pages must be free."""
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
        """Put a prompt's keys and values into its pages; `indices` selects its tokens."""
        steps = torch.arange(len(indices), device=indices.device)
        numbers = torch.tensor(pages, device=indices.device)
        cells = numbers[steps // self.page_tokens] * self.page_tokens + steps % self.page_tokens
        for layer, (keys, values) in states.items():
            self.keys[layer].flatten(0, 1).index_copy_(0, cells, keys[indices].to(self.dtype))
            self.values[layer].flatten(0, 1).index_copy_(0, cells, values[indices].to(self.dtype))

    def read_text(self, pages: Sequence[int], length: int) -> dict[int, LayerStates]:
        """Return a copy of the keys and values of a text from its pages, by layer."""
        return {
            layer: (keys[pages].flatten(0, 1)[:length], values[pages].flatten(0, 1)[:length])
            for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True))
        }

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values, which is the dtype of the products."""
        return self.keys[0].dtype
