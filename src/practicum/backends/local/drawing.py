"""Drawing one token a row: from logits, settings and a uniform number each."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum import functional as F
from practicum.functional.chunked import chunks
from practicum.types import SamplingParams

BLOCK = 64
"""Tokens whose probabilities are added up before the cumulative sum; only the block that is hit is looked into."""

CACHED = 2**19
"""So many entries at a time are exponentiated and added up, which a processor's cache holds."""


def uniforms(seed: int, count: int) -> Float[Tensor, " T"]:
    """The random stream of one completion; its first numbers do not depend on how many are asked for."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(
    logits: Float[Tensor, "B V"], params: SamplingParams, numbers: Float[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Tokens, their log-probabilities under what was sampled from, and under the model itself."""
    if params.temperature == 0:
        tokens = logits.argmax(dim=-1)
        return tokens, torch.zeros_like(numbers, dtype=logits.dtype), _natural(logits, tokens)
    if params.top_k or params.top_p < 1.0:
        policy = torch.log_softmax(logits, dim=-1)
        tokens, sampled = inverse_cdf(sampling_logprobs(policy, params), numbers)
        return tokens, sampled, F.gather_logprobs(policy, tokens)
    if params.temperature == 1.0:
        tokens, sampled = inverse_cdf(logits, numbers)
        return tokens, sampled, sampled
    tokens, sampled = inverse_cdf(logits / params.temperature, numbers)
    return tokens, sampled, _natural(logits, tokens)


def draw_mixed(
    logits: Float[Tensor, "B V"],
    teacher: Float[Tensor, "B V"],
    share: float,
    params: SamplingParams,
    numbers: Float[Tensor, " B"],
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """As `draw`, from `share` times the teacher's distribution and the rest of the model's own."""
    if share == 0:
        return draw(logits, params, numbers)
    policy = torch.log_softmax(logits, dim=-1)
    theirs = sampling_logprobs(torch.log_softmax(teacher, dim=-1), params)
    mixed = F.mixture([(share, theirs), (1.0 - share, sampling_logprobs(policy, params))])
    tokens, sampled = inverse_cdf(mixed, numbers)
    return tokens, sampled, F.gather_logprobs(policy, tokens)


def sampling_logprobs(policy: Float[Tensor, "B V"], params: SamplingParams) -> Float[Tensor, "B V"]:
    """The distribution that is sampled from: temperature, then top-k, then top-p, renormalised."""
    if params.temperature == 0:
        greedy = torch.full_like(policy, -torch.inf)
        return greedy.scatter(-1, policy.argmax(dim=-1, keepdim=True), 0.0)
    logprobs = F.temper(policy, params.temperature) if params.temperature != 1.0 else policy
    if params.top_k:
        smallest = logprobs.topk(min(params.top_k, logprobs.shape[-1]), dim=-1).values[..., -1:]
        logprobs = logprobs.masked_fill(logprobs < smallest, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = torch.log_softmax(logprobs, dim=-1).sort(dim=-1, descending=True)
        before = ordered.exp().cumsum(dim=-1) - ordered.exp()
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= params.top_p)
        logprobs = logprobs.masked_fill(outside, -torch.inf)
    return torch.log_softmax(logprobs, dim=-1) if params.top_k or params.top_p < 1.0 else logprobs


def inverse_cdf(
    scores: Float[Tensor, "B V"], numbers: Float[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """The tokens at which the cumulative softmax of `scores` passes the uniform numbers, and their log-probabilities.

    Never a token of probability 0. One exponential a token; sums of more than a block are taken in float64.
    """
    count, width = scores.shape
    rows = max(CACHED // width, 1) if scores.device.type == "cpu" else max(count, 1)
    parts = [_inverse_cdf(scores[part], numbers[part]) for part in chunks(count, rows)]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _inverse_cdf(
    scores: Float[Tensor, "B V"], numbers: Float[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    count, width = scores.shape
    blocks = -(-width // BLOCK)
    weights = torch.softmax(scores, dim=-1)
    if blocks * BLOCK != width:
        weights = torch.nn.functional.pad(weights, (0, blocks * BLOCK - width))
    cells = weights.view(count, blocks, BLOCK)
    mass = cells.sum(dim=-1).double()
    cumulative = mass.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = _below(numbers.double()[:, None] * total, total)
    block = torch.searchsorted(cumulative, target, right=True).clamp_max(blocks - 1)
    within = cells.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(dim=-1)
    rest = target - (cumulative.gather(1, block) - mass.gather(1, block))
    place = torch.searchsorted(within, _below(rest, within[:, -1:]), right=True)
    tokens = (block * BLOCK + place).clamp_max(width - 1)
    logprobs = (weights.gather(1, tokens).double() / total).log()
    return tokens[:, 0], logprobs[:, 0].to(scores.dtype)


def _below(values: Float[Tensor, "B 1"], limit: Float[Tensor, "B 1"]) -> Float[Tensor, "B 1"]:
    """The values, none at or past the limit."""
    return values.clamp_min(0.0).minimum(torch.nextafter(limit, torch.zeros_like(limit)))


def _natural(logits: Float[Tensor, "B V"], tokens: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    return F.gather_logprobs(logits, tokens) - torch.logsumexp(logits, dim=-1)
