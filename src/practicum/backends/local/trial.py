"""Try at load time whether a model decodes token by token as it computes a full text.

An architecture that ignores the cache, or loses part of it when rows are selected, would silently
sample from another distribution. So short texts are decoded by the very code that samples, and
compared with a plain forward pass.
"""

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from practicum.backends.local.decode_batch import (
    PaddedDecodeBatch,
    SlotDecodeBatch,
    open_decode_batch,
)
from practicum.backends.local.decode_step import DecodeJob, PromptTokens, SlotStep
from practicum.backends.local.language_model import Decoding, LanguageModel
from practicum.backends.local.llama_weights import find_llama_weights
from practicum.backends.local.native import load_library
from practicum.backends.local.packing import enable_packing, pad_sequences
from practicum.backends.local.prepared import MIN_DECODE_STEPS, PrepackedModel
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.static import list_graphs
from practicum.ports import DecodeBatch
from practicum.text.tokenizers import shorten_error
from practicum.types import SampleRequest, SamplingParams

log = logging.getLogger(__name__)

PROMPTS = ((3, 1, 4, 1, 5), (2, 7, 1))
"""Prompts of different lengths, so that the second one is padded if the batch pads."""

TWIN_VOCABULARY = 64
"""The tokens of the tiny model on which the compiled step is tried."""

ANSWER = (6, 2)
"""The tokens decoded after a prompt."""

LONG_PROMPT = tuple(range(1, 41)) * 7
"""A prompt whose text is in more than one page."""

SAMPLED_TOKENS = 20
"""The tokens of each completion that the static step is tried with: more than one window."""


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


@torch.no_grad()
def can_decode_natively(language_model: LanguageModel) -> bool:
    """Return True if the compiled decode step computes models of this architecture.

    A tiny model of the same class and settings, with random weights, is decoded by it and compared
    with a forward pass: it finds what the names of weights do not show, such as a multiplier.
    """
    model = language_model.model
    if language_model.device.type != "cpu" or not language_model.is_exact:
        return False
    if find_llama_weights(model, merge=False) is None or load_library() is None:
        return False
    twin = _build_twin(model, Decoding.NATIVE)
    if not twin.max_packed_tokens:
        return False
    prompts = [*PROMPTS, PROMPTS[0]]
    batch = open_decode_batch(twin, {}, prompts, 2, MIN_DECODE_STEPS)
    return _measure_difference(twin, batch) < 1e-4


def choose_decoding(language_model: LanguageModel, wish: str) -> Decoding:
    """Return how a model decodes if the recipe wishes for `auto`, `native`, `graph` or `torch`.

    It is torch if the wish cannot be fulfilled.
    """
    if wish in ("auto", "native") and can_decode_natively(language_model):
        return Decoding.NATIVE
    if wish in ("auto", "graph") and language_model.device.type == "cuda":
        return find_graph(language_model)
    return Decoding.TORCH


@torch.no_grad()
def find_graph(language_model: LanguageModel) -> Decoding:
    """Return the static step that computes this model on its device, or `TORCH` if none does.

    A tiny model of the same class is sampled from, as in `can_decode_natively`, and then one with
    heads as wide as this model's, on its device and in its dtype: kernels may refuse any of these.
    """
    model = language_model.model
    weights = find_llama_weights(model, merge=False)
    if weights is None:
        return Decoding.TORCH
    twin = _build_twin(model, Decoding.MASKED_GRAPH)
    if not twin.max_packed_tokens or not _measure_sampling(twin) < 1e-4:
        return Decoding.TORCH
    bound = 1e-3 if language_model.is_exact else 0.05
    for decoding in list_graphs(language_model, weights.head_width):
        modules: Any = _shrink(model, weights.head_width)
        modules = modules.to(language_model.device, model.dtype)
        probe = replace(
            language_model, model=modules, vocab_size=TWIN_VOCABULARY, decoding=decoding
        )
        try:
            difference = _measure_sampling(enable_packing(probe))
        except RuntimeError as error:
            # A kernel that does not know this use of it: the next way may.
            log.warning(f"{decoding}: this device cannot decode so ({shorten_error(error)})")
            continue
        if difference <= bound:
            return decoding
        log.warning(f"{decoding}: log-probabilities differ by {difference:.2g} nats from torch's")
    return Decoding.TORCH


def _measure_sampling(language_model: LanguageModel) -> float:
    """Return the largest difference of sampled tokens' log-probabilities from a forward pass.

    It is the mean of a text; infinite if no text is short enough for the model.
    """
    room = language_model.max_packed_tokens - SAMPLED_TOKENS
    prompts = [prompt for prompt in (*PROMPTS, PROMPTS[0], LONG_PROMPT) if len(prompt) <= room]
    if not prompts:
        return math.inf
    requests = [SampleRequest(prompt, seed) for seed, prompt in enumerate(prompts)]
    samples = LocalSampler(language_model, batch_size=2).sample(
        requests, SamplingParams(SAMPLED_TOKENS)
    )
    texts = [
        (*prompt, *sample.tokens.tolist()) for prompt, sample in zip(prompts, samples, strict=True)
    ]
    logprobs = _compute_by_forward(language_model, texts).cpu()
    differences = [
        logprobs[row, len(prompt) - 1 : len(text) - 1].gather(1, sample.tokens[:, None])[:, 0]
        - sample.policy_logprobs
        for row, (prompt, text, sample) in enumerate(zip(prompts, texts, samples, strict=True))
    ]
    return torch.stack([difference.abs().mean() for difference in differences]).max().item()


def _build_twin(model: PreTrainedModel, decoding: Decoding) -> LanguageModel:
    """Return a tiny model of the same class and settings that decodes in a given way."""
    return enable_packing(LanguageModel(_shrink(model), TWIN_VOCABULARY, decoding=decoding))


def _shrink(model: PreTrainedModel, head_width: int = 8) -> PreTrainedModel:
    """Return a tiny model of the same class and settings, with random weights."""
    config: Any = copy.deepcopy(model.config)
    groups = max(config.num_attention_heads // config.num_key_value_heads, 1)
    sizes = {
        "vocab_size": TWIN_VOCABULARY,
        "hidden_size": 8 * groups,
        "num_attention_heads": 2 * groups,
        "num_key_value_heads": 2,
        "head_dim": head_width,
        "intermediate_size": 24,
        "num_hidden_layers": min(2, config.num_hidden_layers),
        "pad_token_id": None,
    }
    for name, size in sizes.items():
        setattr(config, name, size)
    if config.to_dict().get("layer_types"):
        config.layer_types = config.layer_types[:2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        twin = type(model)(config)
        for weight in twin.parameters():
            if weight.dim() == 1:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=weight.shape[1] ** -0.5)
    return twin.eval()


def _open_batches(language_model: LanguageModel) -> Iterator[DecodeBatch]:
    """Yield a decode batch of each kind that sampling may use: slots, padded, or both."""
    vocabulary = language_model.vocab_size
    prompts = [tuple(token % vocabulary for token in prompt) for prompt in (*PROMPTS, PROMPTS[0])]
    longest = max(map(len, prompts)) + len(ANSWER)
    prepacked = PrepackedModel(language_model, len(ANSWER))
    job = DecodeJob(language_model, {}, prepacked, prompts, 2, longest)
    if longest <= language_model.max_packed_tokens:
        yield SlotDecodeBatch(job, SlotStep(job))
    if language_model.max_packed_tokens < language_model.context_length:
        yield PaddedDecodeBatch(job)


def _measure_difference(language_model: LanguageModel, batch: DecodeBatch) -> float:
    """Return the largest difference between decoding and a forward pass, in nats.

    At each position it is the mean difference over the tokens that would be sampled there. Two
    texts start, the first one ends, its prompt starts again in the free row if the batch refills,
    and all go on.
    """
    vocabulary = language_model.vocab_size
    texts = [tuple(token % vocabulary for token in (*prompt, *ANSWER)) for prompt in PROMPTS]
    expected_logprobs = _compute_by_forward(language_model, texts)
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


def _compute_by_forward(
    language_model: LanguageModel, texts: Sequence[PromptTokens]
) -> Float[Tensor, "B L V"]:
    """Return the log-probabilities after each token of some texts, undecoded."""
    ids, mask = pad_sequences(texts, side="right", device=language_model.device)
    return language_model.head().logprobs(language_model.body(ids, mask))
