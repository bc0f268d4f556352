"""A trial at load: is a model, read token by token, the model that it is when it reads whole texts?

An architecture that ignores the cache, or loses part of it where rows are selected, would sample from something else than it is
without a word. So short texts are read by the very code that samples, and held to a plain forward pass.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import pad_sequences
from practicum.backends.local.prepared import PrepackedModel
from practicum.backends.local.reading import DecodeJob, PaddedDecodeBatch, SlotDecodeBatch
from practicum.ports import DecodeBatch

PROMPTS = ((3, 1, 4, 1, 5), (2, 7, 1))
"""Of different lengths, so that the second one is padded where any is."""

ANSWER = (6, 2)
"""The tokens that are decoded after a prompt."""


@torch.no_grad()
def why_unsampled(language_model: LanguageModel) -> str:
    """Return in a sentence why a model cannot be sampled from, empty where it can.

    It cannot where a token's log-probabilities, decoded, are not those of a forward pass over the same text.
    """
    model = language_model.model
    who = f"{model.name_or_path}: {type(model).__name__}"
    try:
        difference = max(
            _difference(language_model, reading) for reading in _readings(language_model)
        )
    except Exception as error:
        # Whatever the code of an architecture raises where it does not know this use of its cache.
        return f"{who} cannot be read token by token ({type(error).__name__}: {_first_line(error)}), so it cannot be sampled from"
    if not difference <= (1e-3 if language_model.exact else 0.3):  # also where it is no number
        return (
            f"{who} read token by token is not the model that reads whole texts (log-probabilities differ by "
            f"{difference:.2g} nats in the mean), so it cannot be sampled from"
        )
    return ""


def _readings(language_model: LanguageModel) -> Iterator[DecodeBatch]:
    """The ways in which texts of this model are read: in slots, in lockstep, or either by their length."""
    vocabulary = language_model.vocab_size
    prompts = [tuple(token % vocabulary for token in prompt) for prompt in (*PROMPTS, PROMPTS[0])]
    longest = max(map(len, prompts)) + len(ANSWER)
    work = DecodeJob(
        language_model, {}, PrepackedModel(language_model, len(ANSWER)), prompts, 2, longest
    )
    if longest <= language_model.packs_up_to:
        yield SlotDecodeBatch(work)
    if language_model.packs_up_to < language_model.context_length:
        yield PaddedDecodeBatch(work)


def _difference(language_model: LanguageModel, reading: DecodeBatch) -> float:
    """Return how far the log-probabilities are apart, in nats: the most at any place, the mean over what would be drawn there.

    Two texts begin, the first one ends, the first prompt takes its place anew where texts can, and all go on.
    """
    expected = _by_forward(language_model)
    tokens = torch.tensor([token % language_model.vocab_size for token in ANSWER])
    apart: list[Tensor] = []

    def compare(*rows: tuple[int, int]) -> None:
        """Hold the rows to the forward pass; each is the number of its prompt, and how much of the answer was read."""
        prompts = [prompt for prompt, _ in rows]
        places = [len(PROMPTS[prompt]) - 1 + count for prompt, count in rows]
        whole = expected[prompts, places]
        decoded = torch.log_softmax(reading.logits().float(), dim=-1)
        apart.append((whole.exp() * (decoded - whole).abs()).sum(dim=-1).max())

    reading.admit(2)
    compare((0, 0), (1, 0))
    reading.advance(tokens[[0, 0]], [1])
    compare((1, 1))
    if reading.refills:
        reading.admit(1)
        reading.advance(tokens[[1, 0]], [0, 1])
        compare((1, 2), (0, 1))
    else:
        reading.advance(tokens[[1]], [0])
        compare((1, 2))
    return torch.stack(apart).max().item()


def _by_forward(language_model: LanguageModel) -> Float[Tensor, "B L V"]:
    """The log-probabilities after each token of the prompts and their answers, read at once."""
    vocabulary = language_model.vocab_size
    texts = [tuple(token % vocabulary for token in (*prompt, *ANSWER)) for prompt in PROMPTS]
    ids, mask = pad_sequences(texts, side="right", device=language_model.device)
    return language_model.head().logprobs(language_model.body(ids, mask))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
