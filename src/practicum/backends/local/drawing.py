"""Sample the next token of each row from its logits and its own random stream."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum import functional as F
from practicum.backends.local.native.library import NativeLibrary
from practicum.errors import NumericError
from practicum.functional.chunked import chunks
from practicum.functional.truncation import sampling_logprobs
from practicum.types import SampleRequest, SamplingParams

VOCABULARY_BLOCK = 64
"""The tokens in one block of the race; only the winning block runs a second round."""

MAX_CACHED_ENTRIES = 2**19
"""The largest number of entries raced at once on a CPU, so that they fit in its cache."""


def open_random_stream(seed: int) -> torch.Generator:
    """Return the random stream of one completion."""
    return torch.Generator().manual_seed(seed)


def open_request_stream(request: SampleRequest, vocabulary: int) -> torch.Generator:
    """Return the random stream of a request, advanced past the tokens that it continues."""
    if request.continues is None:
        return open_random_stream(request.seed)
    seed, tokens = request.continues
    stream = open_random_stream(seed)
    for _ in range(tokens):
        draw_exponentials([stream], vocabulary)
    return stream


def draw_exponentials(streams: Sequence[torch.Generator], vocabulary: int) -> Float[Tensor, "B N"]:
    """Draw the exponential variates for sampling one token of each completion.

    Each row has one variate for every block of the vocabulary, and one for every token of a block.
    """
    noise = torch.empty(len(streams), count_exponentials(vocabulary), dtype=torch.float64)
    for row, stream in zip(noise, streams, strict=True):
        row.exponential_(generator=stream)
    return noise


def count_exponentials(vocabulary: int) -> int:
    """Return the number of exponential variates per sampled token."""
    return -(-vocabulary // VOCABULARY_BLOCK) + VOCABULARY_BLOCK


def build_divergence_error() -> NumericError:
    """Return the error for log-probabilities of sampled tokens that are not numbers."""
    return NumericError(
        "the model's log-probabilities are not numbers, so its weights diverged or are damaged; "
        "lower optimizer.learning_rate and resume from an earlier checkpoint"
    )


def sample_tokens(
    logits: Float[Tensor, "B V"],
    params: SamplingParams,
    noise: Float[Tensor, "B N"],
    library: NativeLibrary | None = None,
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Sample one token per row, with the compiled program if it is given.

    Returns the tokens and their log-probabilities under the sampling distribution (after
    temperature, top-k and top-p, without banned tokens) and under the model's own distribution.
    """
    if params.banned_ids:
        banned = torch.tensor(sorted(params.banned_ids), device=logits.device)
        return sample_other_tokens(logits, params, noise, banned)
    if params.temperature == 0:
        tokens = logits.argmax(dim=-1)
        certain = logits.new_zeros(len(logits))
        return tokens, certain, _compute_untempered_logprobs(logits, tokens)
    if params.top_k or params.top_p < 1.0:
        policy = torch.log_softmax(logits, dim=-1)
        tokens, sampled = sample_by_exponential_race(sampling_logprobs(policy, params), noise)
        return tokens, sampled, F.gather_logprobs(policy, tokens)
    if library is not None:
        return _draw_natively(library, logits, params.temperature, noise)
    if params.temperature == 1.0:
        tokens, sampled = sample_by_exponential_race(logits, noise)
        return tokens, sampled, sampled
    tokens, sampled = sample_by_exponential_race(logits / params.temperature, noise)
    return tokens, sampled, _compute_untempered_logprobs(logits, tokens)


def sample_other_tokens(
    logits: Float[Tensor, "B V"],
    params: SamplingParams,
    noise: Float[Tensor, "B N"],
    banned: Int[Tensor, " K"],
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Sample as `sample_tokens` does, without the banned tokens, which are on the device."""
    allowed = logits.index_fill(-1, banned, -torch.inf)
    tokens, sampled, _ = sample_tokens(allowed, replace(params, banned_ids=frozenset()), noise)
    return tokens, sampled, _compute_untempered_logprobs(logits, tokens)


def _draw_natively(
    library: NativeLibrary,
    logits: Float[Tensor, "B V"],
    temperature: float,
    noise: Float[Tensor, "B N"],
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Run the race of `sample_by_exponential_race` in one pass over the logits."""
    rows, vocabulary = logits.shape
    threads = torch.get_num_threads()
    logits, room = logits.contiguous(), torch.empty(threads, vocabulary)
    tokens = torch.empty(rows, dtype=torch.long)
    sampled, policy = torch.empty(rows), torch.empty(rows)
    sizes = rows, vocabulary, VOCABULARY_BLOCK
    results = tokens, sampled, policy
    library.call("draw", logits, *sizes, noise, 1.0 / temperature, room, *results, threads=threads)
    return tokens, sampled, policy


@dataclass(frozen=True)
class TokenReading:
    """See `practicum.ports.Reading`. `noise` is drawn by `draw_exponentials`."""

    logits: Float[Tensor, "B V"]
    params: SamplingParams
    noise: Float[Tensor, "B N"]
    library: NativeLibrary | None = None

    @property
    def logprobs(self) -> Float[Tensor, "B V"]:
        """The sampling distribution."""
        return self._logprobs

    @cached_property
    def _logprobs(self) -> Float[Tensor, "B V"]:
        logits = self.logits
        if self.params.banned_ids:
            banned = torch.tensor(sorted(self.params.banned_ids), device=logits.device)
            logits = logits.index_fill(-1, banned, -torch.inf)
        return sampling_logprobs(torch.log_softmax(logits, dim=-1), self.params)

    @cached_property
    def _samples(self) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
        """The tokens that the model samples from its distribution; see `sample_tokens`."""
        return sample_tokens(self.logits, self.params, self.noise, self.library)

    @property
    def proposal(self) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
        """The tokens that the model samples, with their sampling log-probabilities."""
        return self._samples[:2]

    def draw(self, scores: Float[Tensor, "B V"]) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
        """Sample from the softmax of `scores` with the same random numbers."""
        return sample_by_exponential_race(scores, self.noise)

    def compute_policy_logprobs(self, tokens: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Return the tokens' untempered log-probabilities."""
        # The model's own token keeps the exact number that the model records without a partner.
        proposed, _, policy = self._samples
        return torch.where(
            tokens == proposed, policy, _compute_untempered_logprobs(self.logits, tokens)
        )


def sample_by_exponential_race(
    scores: Float[Tensor, "B V"], noise: Float[Tensor, "B N"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """Sample a token of each row from the softmax of `scores`; never a token of probability 0.

    Returns the tokens and their log-probabilities. Every candidate arrives after an exponentially
    distributed time, with its probability as the rate. The first candidate to arrive wins, which
    happens with exactly its probability (the Gumbel trick, Maddison et al. 2014).
    """
    count, width = scores.shape
    rows = max(MAX_CACHED_ENTRIES // width, 1) if scores.device.type == "cpu" else max(count, 1)
    parts = [_race(scores[part], noise[part]) for part in chunks(count, rows)]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _race(
    scores: Float[Tensor, "B V"], noise: Float[Tensor, "B N"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    # Blocks race first, then the tokens of the winning block: this takes 832 random numbers per
    # token for a vocabulary of 49,152, instead of 49,152. Rounding that changes every probability
    # by a relative e changes the winner with a probability of about e. Inverting the cumulative
    # distribution is as fast, but rounding moves all of its boundaries, so the other texts of a
    # batch would change many more tokens.
    count, width = scores.shape
    blocks = -(-width // VOCABULARY_BLOCK)
    weights = torch.softmax(scores, dim=-1)
    if blocks * VOCABULARY_BLOCK != width:
        weights = torch.nn.functional.pad(weights, (0, blocks * VOCABULARY_BLOCK - width))
    cells = weights.view(count, blocks, VOCABULARY_BLOCK)
    mass = cells.sum(dim=-1).double()
    block = _find_first_arrival(mass, noise[:, :blocks])
    winner = block[:, :, None].expand(-1, -1, VOCABULARY_BLOCK)
    block_weights = cells.gather(1, winner)[:, 0].double()
    index = _find_first_arrival(block_weights, noise[:, blocks:])
    logprobs = (block_weights.gather(1, index) / mass.sum(dim=-1, keepdim=True)).log()
    return (block * VOCABULARY_BLOCK + index)[:, 0], logprobs[:, 0].to(scores.dtype)


def _find_first_arrival(
    rates: Float[Tensor, "B N"], noise: Float[Tensor, "B N"]
) -> Int[Tensor, "B 1"]:
    """Return the index of the first arrival in each row; a candidate with rate 0 never arrives."""
    return torch.where(rates > 0, noise / rates, torch.inf).argmin(dim=-1, keepdim=True)


def _compute_untempered_logprobs(
    logits: Float[Tensor, "B V"], tokens: Int[Tensor, " B"]
) -> Float[Tensor, " B"]:
    # Without log_softmax, which would write a [B, V] matrix for B numbers.
    return F.gather_logprobs(logits, tokens) - torch.logsumexp(logits, dim=-1)
