"""Project a distribution onto another vocabulary with a sparse row-stochastic matrix (X-Token,
arXiv 2605.21699).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.functional.precision import precise


def decay_weights(
    tokens: Int[Tensor, " N"], places: Int[Tensor, " N"], size: int, decay: float
) -> Float[Tensor, " N"]:
    """Return the share of its token's mass that each entry of a spelling gets: the powers of the
    decay by place, normalised for each of `size` tokens.

    A decay of 0 gives all of the mass to the first entry, the token that would be generated next.
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"decay must be in [0, 1], got {decay:g}")
    powers = torch.full_like(places, decay, dtype=torch.float64) ** places
    return powers / powers.new_zeros(size).index_add(0, tokens, powers)[tokens]


def project(
    logprobs: Float[Tensor, "*s V"],
    shared: Int[Tensor, " K"],
    tokens: Int[Tensor, " N"],
    columns: Int[Tensor, " N"],
    weights: Float[Tensor, " N"],
    width: int,
) -> Float[Tensor, "*s W"]:
    """Return probabilities over `width` columns: `shared` tokens keep their column, and the mass of
    `tokens` is distributed over `columns` by `weights`. The mass of a token in neither is lost.
    """
    # Two index operations and no dense matrix: vocabularies have 100,000 tokens, and each spelling
    # has only a few.
    probs = precise(logprobs).exp()
    wide = probs.new_zeros(*probs.shape[:-1], width)
    wide = wide.index_copy(-1, shared, probs[..., shared])
    return wide.index_add(-1, columns, probs[..., tokens] * weights.to(probs))


def pair_columns(
    shared: Int[Tensor, " K"],
    tokens: Int[Tensor, " N"],
    columns: Int[Tensor, " N"],
    weights: Float[Tensor, " N"],
    least: float,
) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
    """Return tokens and the column of each: shared tokens with themselves, then tokens that give a
    column at least `least` of their mass. Each column is used once, by the token that gives it most.
    """
    token_of = dict(zip(shared.tolist(), shared.tolist(), strict=True))
    order = weights.argsort(descending=True, stable=True)
    strong = order[: int((weights >= least).sum())]
    # Above one half no token has two such columns, but several tokens may have the same column.
    for token, column in zip(tokens[strong].tolist(), columns[strong].tolist(), strict=True):
        token_of.setdefault(column, token)
    pairs = torch.tensor([list(token_of.values()), list(token_of.keys())]).to(shared.device)
    return pairs[0], pairs[1]
