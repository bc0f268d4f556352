"""The sampling distribution: a model's own after temperature, top-k and top-p."""

import torch
from jaxtyping import Float

from practicum.functional.distributions import temper
from practicum.types import SamplingParams


def sampling_logprobs(
    policy: Float[torch.Tensor, "B V"], params: SamplingParams
) -> Float[torch.Tensor, "B V"]:
    """Return the sampling distribution: temperature, then top-k, then top-p, renormalised."""
    if params.temperature == 0:
        greedy = torch.full_like(policy, -torch.inf)
        return greedy.scatter(-1, policy.argmax(dim=-1, keepdim=True), 0.0)
    logprobs = temper(policy, params.temperature) if params.temperature != 1.0 else policy
    if params.top_k:
        smallest = logprobs.topk(min(params.top_k, logprobs.shape[-1]), dim=-1).values[..., -1:]
        logprobs = logprobs.masked_fill(logprobs < smallest, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = torch.log_softmax(logprobs, dim=-1).sort(dim=-1, descending=True)
        # Mass before a token, not through it: the token that crosses top_p stays in the nucleus.
        before = ordered.exp().cumsum(dim=-1) - ordered.exp()
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(
            -1, order, before >= params.top_p
        )
        logprobs = logprobs.masked_fill(outside, -torch.inf)
    return torch.log_softmax(logprobs, dim=-1) if params.top_k or params.top_p < 1.0 else logprobs
