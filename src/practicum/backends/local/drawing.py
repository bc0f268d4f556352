"""Drawing one token a row: from logits, settings and the next numbers of each row's own random stream."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum import functional as F
from practicum.functional.chunked import chunks
from practicum.functional.truncation import sampling_logprobs
from practicum.types import SamplingParams

VOCABULARY_BLOCK = 64
"""Tokens whose probabilities are added up; only the block that is drawn is looked into."""

MAX_CACHED_ENTRIES = 2**19
"""So many entries at a time are exponentiated and added up, which a processor's cache holds."""


def random_stream(seed: int) -> torch.Generator:
    """The random stream of one completion."""
    return torch.Generator().manual_seed(seed)


def draw_exponentials(streams: Sequence[torch.Generator], vocabulary: int) -> Float[Tensor, "B N"]:
    """What one token of each completion is drawn with: exponential numbers for the blocks, and for the tokens of one block."""
    noise = torch.empty(
        len(streams), -(-vocabulary // VOCABULARY_BLOCK) + VOCABULARY_BLOCK, dtype=torch.float64
    )
    for row, stream in zip(noise, streams, strict=True):
        row.exponential_(generator=stream)
    return noise


def draw(
    logits: Float[Tensor, "B V"], params: SamplingParams, noise: Float[Tensor, "B N"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Tokens, their log-probabilities under what was sampled from, and under the model itself."""
    if params.temperature == 0:
        tokens = logits.argmax(dim=-1)
        return (
            tokens,
            torch.zeros(len(logits), dtype=logits.dtype, device=logits.device),
            _compute_untempered_logprobs(logits, tokens),
        )
    if params.top_k or params.top_p < 1.0:
        policy = torch.log_softmax(logits, dim=-1)
        tokens, sampled = sample_by_exponential_race(sampling_logprobs(policy, params), noise)
        return tokens, sampled, F.gather_logprobs(policy, tokens)
    if params.temperature == 1.0:
        tokens, sampled = sample_by_exponential_race(logits, noise)
        return tokens, sampled, sampled
    tokens, sampled = sample_by_exponential_race(logits / params.temperature, noise)
    return tokens, sampled, _compute_untempered_logprobs(logits, tokens)


def sample_mixed_tokens(
    logits: Float[Tensor, "B V"],
    teacher: Float[Tensor, "B V"],
    share: float,
    params: SamplingParams,
    noise: Float[Tensor, "B N"],
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """As `draw`, from `share` times the teacher's distribution and the rest of the model's own."""
    if share == 0:
        return draw(logits, params, noise)
    policy = torch.log_softmax(logits, dim=-1)
    theirs = sampling_logprobs(torch.log_softmax(teacher, dim=-1), params)
    mixed = F.mixture([(share, theirs), (1.0 - share, sampling_logprobs(policy, params))])
    tokens, sampled = sample_by_exponential_race(mixed, noise)
    return tokens, sampled, F.gather_logprobs(policy, tokens)


def sample_by_exponential_race(
    scores: Float[Tensor, "B V"], noise: Float[Tensor, "B N"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """A token of each row drawn from the softmax of `scores`, and its log-probability; never a token of probability 0.

    Every candidate arrives after a time drawn from the exponential distribution of its probability's rate, and the first wins,
    with just that probability (the Gumbel trick, Maddison et al. 2014). First the blocks race and then the tokens of the
    winner. Rounding that moves every probability by a share e changes the winner with a chance of about e; where the
    cumulative distribution is inverted, it moves every one of the vocabulary's boundaries.
    """
    count, width = scores.shape
    rows = max(MAX_CACHED_ENTRIES // width, 1) if scores.device.type == "cpu" else max(count, 1)
    parts = [_race(scores[part], noise[part]) for part in chunks(count, rows)]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _race(
    scores: Float[Tensor, "B V"], noise: Float[Tensor, "B N"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    # Racing the blocks first takes 832 random numbers a token for a vocabulary of 49,152, where one a candidate would take all.
    count, width = scores.shape
    blocks = -(-width // VOCABULARY_BLOCK)
    weights = torch.softmax(scores, dim=-1)
    if blocks * VOCABULARY_BLOCK != width:
        weights = torch.nn.functional.pad(weights, (0, blocks * VOCABULARY_BLOCK - width))
    cells = weights.view(count, blocks, VOCABULARY_BLOCK)
    mass = cells.sum(dim=-1).double()
    block = _find_first_arrival(mass, noise[:, :blocks])
    within = cells.gather(1, block[:, :, None].expand(-1, -1, VOCABULARY_BLOCK))[:, 0].double()
    place = _find_first_arrival(within, noise[:, blocks:])
    logprobs = (within.gather(1, place) / mass.sum(dim=-1, keepdim=True)).log()
    return (block * VOCABULARY_BLOCK + place)[:, 0], logprobs[:, 0].to(scores.dtype)


def _find_first_arrival(
    rates: Float[Tensor, "B N"], noise: Float[Tensor, "B N"]
) -> Int[Tensor, "B 1"]:
    """Who arrives first; nobody whose rate is 0."""
    return torch.where(rates > 0, noise / rates, torch.inf).argmin(dim=-1, keepdim=True)


def _compute_untempered_logprobs(
    logits: Float[Tensor, "B V"], tokens: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    return F.gather_logprobs(logits, tokens) - torch.logsumexp(logits, dim=-1)
