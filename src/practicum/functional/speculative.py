"""Speculative sampling: a draft model proposes tokens, the target model accepts some.

The accepted text has the distribution of the target's samples. Leviathan et al., arXiv 2211.17192;
Chen et al., arXiv 2302.01318. The draft model is a student, so it comes first.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.functional.divergences import tvd
from practicum.functional.precision import finite, precise
from practicum.functional.sequence import gather_logprobs


def acceptance(
    draft_logprob: Float[Tensor, "*s"], target_logprob: Float[Tensor, "*s"], lenience: float = 1.0
) -> Float[Tensor, "*s"]:
    """Return `min(1, p / (l q))`: the probability of accepting a token sampled from the draft model.

    A lenience l below 1 accepts more (2211.17192, appendix A.5). No token is then sampled with more
    than its probability p / l.
    """
    ratio = finite(target_logprob) - finite(draft_logprob) - math.log(lenience)
    return ratio.clamp(max=0.0).exp()


def residual(
    draft: Float[Tensor, "*s V"], target: Float[Tensor, "*s V"], lenience: float = 1.0
) -> Float[Tensor, "*s V"]:
    """Return `log(max(p - l q, 0) / sum)`, the distribution of the token that replaces a rejected
    one.

    If the two models agree, nothing is rejected, and the result is the target.
    """
    excess = (precise(target).exp() - lenience * precise(draft).exp()).clamp(min=0.0)
    total = excess.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, excess.log() - total.log(), precise(target))


def speculative_logprobs(
    draft: Float[Tensor, "*s V"], target: Float[Tensor, "*s V"], lenience: float = 1.0
) -> Float[Tensor, "*s V"]:
    """Return the distribution of a drafted token or its replacement: without lenience the target's."""
    if lenience == 1.0:
        return target
    accepted = acceptance(draft, target, lenience) * precise(draft).exp()
    rejected = 1.0 - accepted.sum(dim=-1, keepdim=True)
    return (accepted + rejected * residual(draft, target, lenience).exp()).log()


def expected_acceptance(
    draft: Float[Tensor, "*s V"], target: Float[Tensor, "*s V"]
) -> Float[Tensor, "*s"]:
    """Return `sum(min(p, q)) = 1 - TVD(q, p)`: the share of the draft model's tokens that are
    accepted in a state.
    """
    return 1.0 - tvd(draft, target)


def count_rejected(
    draft: Float[Tensor, "*s V"], target: Float[Tensor, "*s V"], uniforms: Float[Tensor, "*s"]
) -> Int[Tensor, "*s"]:
    """Return how many of the draft model's independent samples the target rejects before it accepts
    one.

    Each sample is rejected with probability TVD(q, p), so the count has a geometric distribution.
    `uniforms` are from [0, 1): one number draws all samples of a state, and their acceptance.
    """
    # The count is finite also where the models have no token in common.
    rejection = tvd(draft, target).double().clamp(0.0, 1.0 - torch.finfo(torch.float64).eps)
    return (torch.log1p(-uniforms.double()) / rejection.log()).long()


def verify(
    draft: Float[Tensor, "G V"],
    target: Float[Tensor, "G1 V"],
    drafted: Int[Tensor, " G"],
    uniforms: Float[Tensor, " G"],
) -> tuple[int, Float[Tensor, " V"]]:
    """Return how many of G drafted tokens are accepted, and the log-probabilities of the token
    after them.

    `draft` and `target` are the two models' distributions before each drafted token; the target
    also has the distribution after the last drafted token (G1 = G + 1). `uniforms` are from [0, 1).
    The accepted tokens and the next token have the same distribution as samples of the target.
    """
    chances = acceptance(gather_logprobs(draft, drafted), gather_logprobs(target[:-1], drafted))
    accepted = int((uniforms < chances).long().cumprod(dim=0).sum())
    return accepted, target[-1] if accepted == len(drafted) else residual(
        draft[accepted], target[accepted]
    )
