"""Losses of the log-probabilities of given tokens, for a service that receives advantages from
clients.

Each returns one loss per token. As in the Tinker API, the sum over all tokens is minimised, so that
a batch sent in parts has the same gradient as the whole batch. `logprobs` are the learner's and
carry the gradient; everything else is data.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.precision import precise
from practicum.functional.table import Table, defaults_of


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """One loss of given tokens: `function(logprobs, *inputs, **parameters)`, with the inputs' names
    of the Tinker API.

    An input in `filled` may be omitted; it is then this number at every token. `whole_text` states
    that the loss of a token depends on all tokens of its text, so that a text cannot be split.
    """

    name: str
    function: Callable[..., Tensor]
    inputs: tuple[str, ...]
    summary: str
    paper: str = ""
    filled: Mapping[str, float] = field(default_factory=dict)
    whole_text: bool = False

    @property
    def defaults(self) -> Mapping[str, float]:
        """The parameters with their defaults."""
        return defaults_of(self.function)


POLICY_LOSSES = Table(PolicyLoss)
"""Every loss of given tokens by name."""

_SAMPLED_INPUTS = ("logprobs", "advantages")
_GSPO_INPUTS = (*_SAMPLED_INPUTS, "sequence_ratio_mask")


@POLICY_LOSSES.enter(("weights",), "maximum likelihood, weighted", filled={"weights": 1.0})
def cross_entropy(
    logprobs: Float[Tensor, "*s"], weights: Float[Tensor, "*s"]
) -> Float[Tensor, "*s"]:
    """Return `-w log S`: maximum likelihood; with K targets per token and a teacher's probabilities
    as weights, forward KL.

    A client can train on any other loss by sending minus its gradient as the weights.
    """
    return -precise(logprobs) * weights


@POLICY_LOSSES.enter(_SAMPLED_INPUTS, "ratio times advantage")
def importance_sampling(
    logprobs: Float[Tensor, "*s"],
    sampling_logprobs: Float[Tensor, "*s"],
    advantages: Float[Tensor, "*s"],
) -> Float[Tensor, "*s"]:
    """Return `-(S / sampler) A`: the policy gradient of tokens that the sampler generated."""
    return -_ratio(logprobs, sampling_logprobs) * advantages


@POLICY_LOSSES.enter(_SAMPLED_INPUTS, "one-sided clip of the ratio", "1707.06347")
def ppo(
    logprobs: Float[Tensor, "*s"],
    sampling_logprobs: Float[Tensor, "*s"],
    advantages: Float[Tensor, "*s"],
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> Float[Tensor, "*s"]:
    """Return `-min(r A, clip(r) A)` for ratio r; gradient as in `ratio_clip` (arXiv 1707.06347)."""
    ratio = _ratio(logprobs, sampling_logprobs)
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio * advantages, clipped * advantages)


@POLICY_LOSSES.enter(_SAMPLED_INPUTS, "clipped ratio as a weight", "2506.13585")
def cispo(
    logprobs: Float[Tensor, "*s"],
    sampling_logprobs: Float[Tensor, "*s"],
    advantages: Float[Tensor, "*s"],
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> Float[Tensor, "*s"]:
    """Return `-sg(clip(r)) A log S`: clipping the weight keeps all gradients (arXiv 2506.13585)."""
    clipped = (
        _ratio(logprobs, sampling_logprobs).clamp(clip_low_threshold, clip_high_threshold).detach()
    )
    return -clipped * precise(logprobs) * advantages


@POLICY_LOSSES.enter(_SAMPLED_INPUTS, "advantage with a quadratic penalty", "2405.19107")
def dro(
    logprobs: Float[Tensor, "*s"],
    sampling_logprobs: Float[Tensor, "*s"],
    advantages: Float[Tensor, "*s"],
    beta: float = 0.05,
) -> Float[Tensor, "*s"]:
    """Return `-(A log S - beta / 2 (log S - log sampler)**2)`, with a quadratic penalty for leaving
    the sampler (arXiv 2405.19107).
    """
    learner = precise(logprobs)
    return -(learner * advantages - 0.5 * beta * (learner - precise(sampling_logprobs)).square())


@POLICY_LOSSES.enter(_GSPO_INPUTS, "one clipped ratio per text", "2507.18071", whole_text=True)
def gspo(
    logprobs: Float[Tensor, "*s"],
    sampling_logprobs: Float[Tensor, "*s"],
    advantages: Float[Tensor, "*s"],
    sequence_ratio_mask: Float[Tensor, "*s"],
    clip_low_threshold: float = 1 - 3e-4,
    clip_high_threshold: float = 1 + 4e-4,
) -> Float[Tensor, "*s"]:
    """Return `-min(s A, clip(s) A)` with one ratio s for a text (GSPO-token, arXiv 2507.18071,
    equation 13).

    s is the geometric mean of `S / sampler` over the tokens that the mask marks, at least one; each
    token has the value of s and the gradient of the token's log S. The inputs are one whole text.
    The default bounds come from the paper's experiments.
    """
    learner = precise(logprobs)
    detached = learner.detach()
    mean = (detached - precise(sampling_logprobs))[sequence_ratio_mask != 0].mean()
    # `learner - detached` is 0 in value and has the gradient of log S: each token keeps its own
    # gradient although all of them share one ratio.
    ratio = (mean + learner - detached).exp()
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def _ratio(
    logprobs: Float[Tensor, "*s"], sampling_logprobs: Float[Tensor, "*s"]
) -> Float[Tensor, "*s"]:
    return (precise(logprobs) - precise(sampling_logprobs)).exp()
