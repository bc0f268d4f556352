"""Speculative sampling: a draft model writes tokens, the target model keeps some, and the text is the target's own.

Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. The draft model is a student, so it comes first.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.functional.divergences import tvd
from practicum.functional.precision import finite, precise
from practicum.functional.sequence import gather_logprobs


def acceptance(
    draft_logprob: Float[Tensor, "*s"], target_logprob: Float[Tensor, "*s"]
) -> Float[Tensor, "*s"]:
    """`min(1, p / q)`: the probability that a token drawn from the draft model is kept."""
    return (finite(target_logprob) - finite(draft_logprob)).clamp(max=0.0).exp()


def residual(draft: Float[Tensor, "*s V"], target: Float[Tensor, "*s V"]) -> Float[Tensor, "*s V"]:
    """`log(max(p - q, 0) / sum)`: what a token is drawn from in the place of one that was not kept.

    Where the two agree nothing is rejected, and it is the target.
    """
    rest = (precise(target).exp() - precise(draft).exp()).clamp(min=0.0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest.log() - total.log(), precise(target))


def expected_acceptance(
    draft: Float[Tensor, "*s V"], target: Float[Tensor, "*s V"]
) -> Float[Tensor, "*s"]:
    """`sum(min(p, q)) = 1 - TVD(q, p)`: the share of the draft model's tokens that are kept in a state."""
    return 1.0 - tvd(draft, target)


def verify(
    draft: Float[Tensor, "G V"],
    target: Float[Tensor, "G1 V"],
    drafted: Int[Tensor, " G"],
    uniforms: Float[Tensor, " G"],
) -> tuple[int, Float[Tensor, " V"]]:
    """How many of G drafted tokens are kept, and the log-probabilities that the token after them is drawn from.

    `draft` and `target` are what the two models say before each drafted token, and the target also what it says after
    the last one (G1 = G + 1); `uniforms` are drawn from [0, 1). Kept tokens and the one after them are distributed as the
    target's own.
    """
    chances = acceptance(gather_logprobs(draft, drafted), gather_logprobs(target[:-1], drafted))
    kept = int((uniforms < chances).long().cumprod(dim=0).sum())
    return kept, target[-1] if kept == len(drafted) else residual(draft[kept], target[kept])
