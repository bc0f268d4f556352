"""Read one token of each row through a Llama-like body, in operations of fixed shape."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.llama_weights import compute_rotations
from practicum.backends.local.static.attention import Attention, PageTable
from practicum.backends.local.static.pages import PagePool
from practicum.backends.local.static.weights import StaticLayer, StaticWeights


class StaticBody:
    """The body over packed weights: norms, rotations and products, and the rows' pages."""

    def __init__(
        self,
        language_model: LanguageModel,
        weights: StaticWeights,
        pool: PagePool,
        attend: Attention,
        longest: int,
    ) -> None:
        self._weights = weights
        self._pool = pool
        self._attend = attend
        self._cosines, self._sines = compute_rotations(
            language_model, weights.llama.head_width, longest, weights.wide
        )

    def read(
        self, tokens: Int[Tensor, " B"], positions: Int[Tensor, " B"], table: PageTable
    ) -> Float[Tensor, "B D"]:
        """Append one token to each row; return the hidden states that predict the next tokens."""
        llama = self._weights.llama
        hidden = llama.embedding[tokens]
        positions = positions.clamp(max=len(self._cosines) - 1)
        rotation = self._cosines[positions][:, None], self._sines[positions][:, None]
        for number, layer in enumerate(self._weights.layers):
            attended = self._attend_layer(number, layer, hidden, rotation, table)
            hidden = hidden + layer.output(attended)
            gate, up = layer.gate_up(self._norm(hidden, layer.inner_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(silu(gate) * up)
        return self._norm_wide(hidden, llama.final_norm).to(hidden.dtype)

    def _attend_layer(
        self,
        number: int,
        layer: StaticLayer,
        hidden: Float[Tensor, "B D"],
        rotation: tuple[Tensor, Tensor],
        table: PageTable,
    ) -> Float[Tensor, "B A"]:
        """Store each row's new key and value, and attend over the row's own text."""
        llama = self._weights.llama
        product = layer.qkv(self._norm(hidden, layer.input_norm))
        heads = product.view(len(product), -1, llama.head_width)
        queries, keys, values = heads.split([llama.heads, llama.groups, llama.groups], dim=1)
        queries = self._place(queries, layer.query_norm, rotation)
        keys = self._place(keys, layer.key_norm, rotation)
        stored = self._pool.keys[number], self._pool.values[number]
        for store, states in zip(stored, (keys, values), strict=True):
            store.flatten(0, 1).index_copy_(0, table.cells, states)
        return self._attend(queries, *stored, table).flatten(1)

    def _norm(self, hidden: Float[Tensor, "B D"], weight: Tensor) -> Float[Tensor, "B D"]:
        return self._norm_wide(hidden, weight).to(self._weights.dtype)

    def _norm_wide(self, states: Float[Tensor, "*s d"], weight: Tensor) -> Float[Tensor, "*s d"]:
        epsilon = self._weights.llama.epsilon
        return rms_norm(states.to(weight.dtype), weight.shape, weight, epsilon)

    def _place(
        self,
        heads: Float[Tensor, "B G d"],
        norm: Float[Tensor, " d"] | None,
        rotation: tuple[Tensor, Tensor],
    ) -> Float[Tensor, "B G d"]:
        """Return the heads, normalized if there is a head norm, and rotated by their position."""
        cosines, sines = rotation
        if norm is not None:
            heads = self._norm_wide(heads, norm)
        first, second = heads.chunk(2, dim=-1)
        turned = torch.cat(
            [first * cosines - second * sines, second * cosines + first * sines], dim=-1
        )
        return turned.to(self._weights.dtype)
