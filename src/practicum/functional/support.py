"""The common support of two vocabularies: the tokens that both have, and one bucket for the rest.

Tokens that only one model has are merged into the bucket. So a divergence of two folded
distributions never exceeds the divergence of any joint refinement (data processing), and tokens
that only one model has are compared only by their total mass.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.functional.distributions import SMALLEST_TAIL
from practicum.functional.precision import IMPOSSIBLE


def fold_outside(
    scores: Float[Tensor, "*s N"],
    size: int,
    outside: Int[Tensor, " M"],
    bucketed: Int[Tensor, " R"],
) -> Float[Tensor, "*s W"]:
    """Return logits or log-probabilities over `size` shared ids and, last, one bucket (W = size +
    1).

    `outside` are the ids below `size` that one of the models lacks: they become -inf. `bucketed`
    are the columns of `scores` that the bucket adds up. A softmax of folded logits is the folded
    softmax.
    """
    # Sums use finite substitutes for -inf, because logsumexp over only -inf has a NaN gradient.
    merged = scores[..., bucketed]
    bucket = torch.logsumexp(merged.clamp(min=IMPOSSIBLE), dim=-1)
    bucket = bucket.masked_fill((merged <= IMPOSSIBLE).all(dim=-1), -math.inf)
    inside = scores[..., :size]
    if inside.shape[-1] < size:
        missing = size - inside.shape[-1]
        inside = torch.nn.functional.pad(inside, (0, missing), value=-math.inf)
    inside = inside.index_fill(-1, outside, -math.inf)
    return torch.cat([inside, bucket[..., None]], dim=-1)


def floor_buckets(folded: Sequence[Float[Tensor, "*s W"]]) -> list[Float[Tensor, "*s W"]]:
    """Return folded distributions with buckets of at least `log(SMALLEST_TAIL)`.

    This is the same floor as for the bucket outside the candidates: without it forward KL is
    infinite where exactly one model has an empty bucket. A bucket that is empty in all
    distributions stays empty.
    """
    buckets = torch.stack([logprobs[..., -1].detach() for logprobs in folded])
    is_empty = torch.isneginf(buckets).all(dim=0)
    floor = math.log(SMALLEST_TAIL)
    return [
        torch.cat([logprobs[..., :-1], _floor(logprobs[..., -1:], is_empty, floor)], dim=-1)
        for logprobs in folded
    ]


def _floor(bucket: Tensor, is_empty: Tensor, floor: float) -> Tensor:
    return bucket.clamp(min=floor).masked_fill(is_empty[..., None], -math.inf)
