"""Drafters: small models that propose a target's next tokens; each type is a module of a method.

A module has `build(target, config, vocabulary, seed)`, which returns a `DraftModel`, and
`write(drafter, folder, layout, depth)` and `read(folder, target)` for folders that other engines load.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum.errors import ModelError, RecipeError
from practicum.functional.head import Head

ROOM = "practicum.ports.drafters"
NEEDED = ("build", "write", "read")

MIN_COVERAGE = 0.5
"""The smallest share of the counted tokens that a draft vocabulary must hold."""

KeysAndValues = tuple[Float[Tensor, "B _ _ d"], Float[Tensor, "B _ _ d"]]


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The tokens of a target that can be drafted: their `ids` in ascending order.

    `size` is the number of rows of the target's embedding.
    """

    ids: Int[Tensor, " v"]
    size: int

    @property
    def t2d(self) -> Bool[Tensor, " V"]:
        """True at the target's tokens that can be drafted."""
        return torch.zeros(self.size, dtype=torch.bool).index_fill(0, self.ids.cpu(), True)

    @property
    def d2t(self) -> Int[Tensor, " v"]:
        """The offset from a draft id to the target's id: `id = draft + d2t[draft]`."""
        return self.ids.cpu() - torch.arange(len(self.ids))

    @classmethod
    def from_buffers(cls, t2d: Tensor, d2t: Tensor, source: str) -> "DraftVocabulary":
        """Read the buffers of a saved drafter; ModelError unless `d2t` holds the offsets of `t2d`."""
        ids = t2d.bool().nonzero()[:, 0]
        if len(ids) != len(d2t) or not torch.equal(ids, d2t.long() + torch.arange(len(d2t))):
            raise ModelError(
                f"{source}: d2t does not hold offsets, since nonzero(t2d) differs from d2t + "
                "arange(len(d2t)); export the drafter again, with d2t[i] = target id - i"
            )
        return cls(ids, len(t2d))

    @classmethod
    def choose(
        cls, texts: Iterable[Sequence[int]], size: int, vocabulary: int, always: Collection[int]
    ) -> "DraftVocabulary":
        """Choose the most frequent tokens of some texts, and the tokens in `always`.

        Tokens of equal frequency are taken in the order of their ids. Raises RecipeError if the
        vocabulary is too small.
        """
        counts = Counter(token for text in texts for token in text)
        ranked = sorted(range(size), key=lambda token: (token not in always, -counts[token], token))
        ids = sorted(ranked[:vocabulary])
        total = sum(counts.values())
        coverage = sum(counts[token] for token in ids) / total if total else 1.0
        if vocabulary < len(always) or coverage < MIN_COVERAGE:
            raise RecipeError(
                f"student.drafter.vocabulary: {vocabulary} tokens are too few: they hold "
                f"{coverage:.0%} of the tokens of the task's answers and {len(always)} tokens end "
                f"an answer; set vocabulary: {max(len(counts) + len(always), vocabulary + 1)}"
            )
        return cls(torch.tensor(ids), size)


class DraftModel(torch.nn.Module):
    """A drafter that reads the target's states after `layers` layers, and continues by its own.

    A row r of a text of tokens x is the target's state at x[r] together with the token x[r + 1]. At
    depth 0 it predicts x[r + 2], and at depth k, from its own state of depth k - 1 and the token
    x[r + 1 + k], it predicts x[r + 2 + k].
    """

    vocabulary: DraftVocabulary
    layers: tuple[int, ...]

    @property
    def head(self) -> Head:
        """The head over the draft vocabulary; it reads the states of `finish`."""
        raise NotImplementedError

    def fuse(self, features: Float[Tensor, "B L F"]) -> Float[Tensor, "B L D"]:
        """Return the first state of each row from the target's states."""
        raise NotImplementedError

    def read(
        self,
        embeddings: Float[Tensor, "B L D"],
        hidden: Float[Tensor, "B L D"],
        positions: Int[Tensor, "B L"],
    ) -> tuple[Float[Tensor, "B H L d"], KeysAndValues]:
        """Return the queries of rows, and their keys and values."""
        raise NotImplementedError

    def attend(
        self,
        hidden: Float[Tensor, "B L D"],
        queries: Float[Tensor, "B H L d"],
        memory: KeysAndValues,
        mask: Bool[Tensor, "#B L R"],
        path: Sequence[KeysAndValues] = (),
    ) -> Float[Tensor, "B L D"]:
        """Return the next state of rows.

        They attend to the rows of depth 0 in `memory` where `mask` is True, and to the same row's
        keys and values at each depth above 0, in `path`.
        """
        raise NotImplementedError

    def finish(self, state: Float[Tensor, "*s D"]) -> Float[Tensor, "*s D"]:
        """Return what the head reads of a state."""
        raise NotImplementedError


def choose_layers(layers: Sequence[int] | None, count: int) -> tuple[int, ...]:
    """Return the numbers of layers after which the target's states are read.

    Raises RecipeError unless there are three different ones below the target's `count` of layers.
    """
    chosen = tuple(layers) if layers is not None else (2, count // 2, count - 3)
    rising = all(low < high for low, high in pairwise(chosen))
    if len(chosen) != 3 or not rising or not 1 <= chosen[0] <= chosen[-1] < count:
        raise RecipeError(
            f"student.drafter.layers: {list(chosen)} are not three rising numbers from 1 to "
            f"{count - 1}, and the target has {count} layers; set layers: [1, 2, 3] or three others"
        )
    return chosen


def embed(target: Any, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
    """Return the target's embedding of tokens, in float32 and without a gradient."""
    weight = target.get_input_embeddings().weight.detach()
    return torch.nn.functional.embedding(tokens, weight).float()
