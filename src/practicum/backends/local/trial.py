"""Try at load time whether a model decodes token by token as it computes a full text.

An architecture that ignores the cache, or loses part of it when rows are selected, would silently
sample from another distribution. So short texts are decoded by the very code that samples, and
compared with a plain forward pass.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.decode_batch import DecodeJob, PaddedDecodeBatch, SlotDecodeBatch
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import pad_sequences
from practicum.backends.local.prepared import PrepackedModel
from practicum.ports import DecodeBatch
from practicum.text.tokenizers import shorten_error

PROMPTS = ((3, 1, 4, 1, 5), (2, 7, 1))
"""Prompts of different lengths, so that the second one is padded if the batch pads."""

ANSWER = (6, 2)
"""The tokens decoded after a prompt."""


@torch.no_grad()
def explain_no_sampling(language_model: LanguageModel) -> str:
    """Explain in one sentence why a model cannot be sampled from; empty if it can.

    It cannot if decoding gives other log-probabilities than a forward pass over the same text.
    """
    model = language_model.model
    who = f"{model.name_or_path}: {type(model).__name__}"
    try:
        batches = _open_batches(language_model)
        difference = max(_measure_difference(language_model, batch) for batch in batches)
    except Exception as error:
        # An architecture's own code may raise anything if it does not know this use of its cache.
        return (
            f"{who} cannot be read token by token ({type(error).__name__}: {shorten_error(error)}), so "
            "it cannot be sampled from"
        )
    # `not <=` and not `>`: a difference that is not a number is refused too.
    if not difference <= (1e-3 if language_model.is_exact else 0.3):
        return (
            f"{who} read token by token is not the model that reads whole texts (log-probabilities "
            f"differ by {difference:.2g} nats in the mean), so it cannot be sampled from"
        )
    return ""


def _open_batches(language_model: LanguageModel) -> Iterator[DecodeBatch]:
    """Yield a decode batch of each kind that sampling may use: slots, padded, or both."""
    vocabulary = language_model.vocab_size
    prompts = [tuple(token % vocabulary for token in prompt) for prompt in (*PROMPTS, PROMPTS[0])]
    longest = max(map(len, prompts)) + len(ANSWER)
    prepacked = PrepackedModel(language_model, len(ANSWER))
    job = DecodeJob(language_model, {}, prepacked, prompts, 2, longest)
    if longest <= language_model.max_packed_tokens:
        yield SlotDecodeBatch(job)
    if language_model.max_packed_tokens < language_model.context_length:
        yield PaddedDecodeBatch(job)


def _measure_difference(language_model: LanguageModel, batch: DecodeBatch) -> float:
    """Return the largest difference between decoding and a forward pass, in nats.

    At each position it is the mean difference over the tokens that would be sampled there. Two
    texts start, the first one ends, its prompt starts again in the free row if the batch refills,
    and all go on.
    """
    expected_logprobs = _compute_by_forward(language_model)
    tokens = torch.tensor([token % language_model.vocab_size for token in ANSWER])
    differences: list[Tensor] = []

    def compare(*rows: tuple[int, int]) -> None:
        """Compare rows with the forward pass; a row is (prompt index, tokens decoded)."""
        prompts = [prompt for prompt, _ in rows]
        positions = [len(PROMPTS[prompt]) - 1 + count for prompt, count in rows]
        expected = expected_logprobs[prompts, positions]
        decoded = torch.log_softmax(batch.logits().float(), dim=-1)
        differences.append((expected.exp() * (decoded - expected).abs()).sum(dim=-1).max())

    batch.admit(2)
    compare((0, 0), (1, 0))
    batch.advance(tokens[[0, 0]], [1])
    compare((1, 1))
    if batch.supports_refill:
        batch.admit(1)
        batch.advance(tokens[[1, 0]], [0, 1])
        compare((1, 2), (0, 1))
    else:
        batch.advance(tokens[[1]], [0])
        compare((1, 2))
    return torch.stack(differences).max().item()


def _compute_by_forward(language_model: LanguageModel) -> Float[Tensor, "B L V"]:
    """Return the log-probabilities after each token of prompts and answers, undecoded."""
    vocabulary = language_model.vocab_size
    texts = [tuple(token % vocabulary for token in (*prompt, *ANSWER)) for prompt in PROMPTS]
    ids, mask = pad_sequences(texts, side="right", device=language_model.device)
    return language_model.head().logprobs(language_model.body(ids, mask))
