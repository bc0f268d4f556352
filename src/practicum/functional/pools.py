"""Several teachers at once: pools of their distributions, and measures of their disagreement.

The weighted sum of reverse KLs to several teachers is the reverse KL to their geometric pool, and
the weighted sum of forward KLs is the forward KL to their arithmetic pool, each up to a constant
that does not depend on the student. W is the sum of the weights and G the geometric pool with
weights w_i / W:

    sum_i w_i KL(S || T_i) = W KL(S || G) + const
    sum_i w_i KL(T_i || S) = W KL(A || S) + const

A geometric pool gives no probability to a token that any member considers impossible; an arithmetic
pool averages.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.distributions import entropy
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.precision import finite, precise


def member_weights(
    logprobs: Sequence[Float[Tensor, "*s V"]], weights: Sequence[float], gate: float | None = None
) -> list[Float[Tensor, "*s"]]:
    """Return the weight of each member at each position: `weights`, but 0 if the member is too
    uncertain.

    A member with an entropy above `gate` nats is left out at that position, and its weight is
    distributed over the remaining members in proportion, so the sum of the weights is unchanged. If
    every member exceeds the gate, none is left out.
    """
    if not logprobs or len(logprobs) != len(weights):
        raise ValueError(
            f"a pool needs one weight per member,"
            f" got {len(weights)} weights for {len(logprobs)} members"
        )
    if min(weights) <= 0 or not all(map(math.isfinite, weights)):
        raise ValueError(f"weights of a pool must be positive, got {list(weights)}")
    constant = [
        torch.full_like(precise(member[..., 0]), weight)
        for member, weight in zip(logprobs, weights, strict=True)
    ]
    if gate is None:
        return constant
    certain = torch.stack([entropy(member) <= gate for member in logprobs])
    certain = certain | ~certain.any(dim=0)
    shares = torch.stack(constant) * certain
    return list(shares * (sum(weights) / shares.sum(dim=0)))


def geometric(
    logprobs: Sequence[Float[Tensor, "*s V"]], weights: Sequence[float], gate: float | None = None
) -> Float[Tensor, "*s V"]:
    """Return the renormalised product `log_softmax(sum_i w_i log T_i)`, the target of DeepSeek-V4's
    sum of reverse KLs.

    The weights are exponents and are used as given: with a sum above 1 the pool is sharper than its
    members, below 1 flatter. A token that is impossible for a member with a positive weight is
    impossible, unless this excludes every token.
    """
    total = torch.zeros_like(precise(logprobs[0]))
    vetoed = torch.zeros_like(total, dtype=torch.bool)
    for share, member in zip(member_weights(logprobs, weights, gate), logprobs, strict=True):
        total = total + share.unsqueeze(-1) * finite(member)
        vetoed = vetoed | (torch.isneginf(member) & (share > 0).unsqueeze(-1))
    # If the members together exclude every token, no veto applies: softmax over nothing is NaN.
    vetoed = vetoed & ~vetoed.all(dim=-1, keepdim=True)
    return torch.log_softmax(total.masked_fill(vetoed, -math.inf), dim=-1)


def arithmetic(
    logprobs: Sequence[Float[Tensor, "*s V"]], weights: Sequence[float], gate: float | None = None
) -> Float[Tensor, "*s V"]:
    """Return the average `log(sum_i w_i T_i)`, with weights that sum to 1."""
    if not math.isclose(sum(weights), 1.0, abs_tol=1e-6):
        raise ValueError(f"weights of an arithmetic pool must sum to 1, got {list(weights)}")
    shares = member_weights(logprobs, weights, gate)
    stacked = torch.stack(
        [
            share.log().unsqueeze(-1) + finite(member)
            for share, member in zip(shares, logprobs, strict=True)
        ]
    )
    impossible = torch.stack(
        [
            torch.isneginf(member) | (share == 0).unsqueeze(-1)
            for share, member in zip(shares, logprobs, strict=True)
        ]
    ).all(dim=0)
    return torch.logsumexp(stacked, dim=0).masked_fill(impossible, -math.inf)


def disagreement(members: Sequence[Float[Tensor, "*s V"]]) -> Float[Tensor, "*s"]:
    """Return the mean total variation of two members: 0 if all agree, 1 if no two share a token."""
    probabilities = [precise(member).exp() for member in members]
    return _mean_of_pairs(
        probabilities, lambda first, second: 0.5 * (first - second).abs().sum(dim=-1)
    )


def top1_conflict(members: Sequence[Float[Tensor, "*s V"]]) -> Float[Tensor, "*s"]:
    """Return the share of pairs of members with different most likely tokens."""
    top_tokens = [member.argmax(dim=-1) for member in members]
    return _mean_of_pairs(
        top_tokens, lambda first, second: (first != second).to(precise(members[0]).dtype)
    )


def conflict_cosine(
    student: Float[Tensor, "*s V"], members: Sequence[Float[Tensor, "*s V"]]
) -> Float[Tensor, "*s"]:
    """Return the mean cosine between the gradients that two members give the student's logits under
    reverse KL.

    At 1 the gradients point in the same direction, at -1 they cancel. A member that equals the
    student has no gradient, and its cosine is 0.
    """
    gradients = [reverse_kl_gradient(student, member) for member in members]
    return _mean_of_pairs(
        gradients, lambda first, second: torch.cosine_similarity(first, second, dim=-1)
    )


def reverse_kl_gradient(
    student: Float[Tensor, "*s V"], teacher: Float[Tensor, "*s V"]
) -> Float[Tensor, "*s V"]:
    """Return KL(S || T)'s gradient in the logits of S: `S * (a - E_S[a])`, `a = log S - log T`."""
    student = student.detach()
    terms = DIVERGENCES["reverse_kl"].contributions(student, teacher)
    return terms - finite(student).exp() * terms.sum(dim=-1, keepdim=True)


def _mean_of_pairs(
    members: Sequence[Tensor], measure: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    if len(members) < 2:
        raise ValueError(f"a measure between members needs at least two, got {len(members)}")
    return torch.stack([measure(first, second) for first, second in combinations(members, 2)]).mean(
        dim=0
    )
