"""Check at load time that decoding token by token matches a full forward pass.

An architecture that ignores the cache, or loses part of it when rows are selected, would silently
sample from another distribution. Short texts are therefore decoded by the same code that samples,
and compared with a plain forward pass. A compiled or static program is compared in the same way: on
the model itself with all of its layers, and on a twin model on which short texts cross each
threshold of the config (see `practicum.backends.local.twin`).
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor
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
from practicum.backends.local.packing import compute_hidden_states, enable_packing
from practicum.backends.local.prepared import MIN_DECODE_STEPS, PrepackedModel
from practicum.backends.local.sampler import run_to_end
from practicum.backends.local.static import choose_settings, list_graphs, open_static_loop
from practicum.backends.local.static.capture import Capture, run_eagerly
from practicum.backends.local.twin import (
    SHORT,
    VOCABULARY,
    WINDOWS,
    build_twin,
    identify_twin,
    shrink,
)
from practicum.backends.local.wide import compute_by_forward, compute_in_float64
from practicum.ports import DecodeBatch
from practicum.text import stop_check
from practicum.text.tokenizers import shorten_error
from practicum.types import SampleRequest, SamplingParams, ScoreRequest

log = logging.getLogger(__name__)

Forward = Callable[[LanguageModel, Sequence[PromptTokens]], Tensor]
"""A forward pass over texts, such as `compute_by_forward`: log-probabilities [B, L, V]."""

PROMPTS = ((3, 1, 4, 1, 5), (2, 7, 1))
"""Prompts of different lengths, so that the second prompt is padded if the batch pads."""

ANSWER = (6, 2)
"""The number of tokens decoded after a prompt."""

LONG_PROMPT = tuple(range(1, 41)) * 7
"""A prompt that is long enough for its text to take more than one page."""

SAMPLED_TOKENS = 20
"""The tokens of each completion in the trial of the static step: more than one window."""

BOUND = 1e-4
"""The tolerance in nats of a float32 program.

The difference is to the model's own modules, in float32 or in float64.
"""

ROUNDED_BOUND = 0.1
"""The tolerance in nats for a model that computes in bfloat16."""

MAX_PACKED_BYTES = 2**31
"""The largest model, in bytes, on which the compiled step itself is tried.

The compiled step packs a copy of all weights. For a larger model, it is only tried on the twin.
"""


@torch.no_grad()
def explain_no_sampling(language_model: LanguageModel) -> str:
    """Explain in one sentence why a model cannot be sampled from; empty if it can.

    It cannot if decoding and a forward pass over the same text give different log-probabilities.
    """
    model = language_model.model
    who = f"{model.name_or_path}: {type(model).__name__}"
    try:
        differences = [
            _measure_difference(language_model, batch) for batch in _open_batches(language_model)
        ]
        differences += _measure_windows(model)
        # Python's `max` of a list with NaN may return any other value.
        difference = torch.tensor(differences).max().item()
    except Exception as error:
        # An architecture's own code may raise any error if it does not support this use of its
        # cache.
        return (
            f"{who} cannot be read token by token ({type(error).__name__}: {shorten_error(error)}), so "
            "it cannot be sampled from"
        )
    # `not <=` instead of `>`: NaN is refused too.
    if not difference <= (1e-3 if language_model.is_exact else 0.3):
        return (
            f"{who} read token by token is not the model that reads whole texts (log-probabilities "
            f"differ by {difference:.2g} nats in the mean), so it cannot be sampled from"
        )
    return ""


def _measure_windows(model: PreTrainedModel) -> list[float]:
    """Measure a twin on texts longer than its windows; the list is empty without windows.

    Only a model with Llama's names has a twin.
    """
    described = model.config.get_text_config().to_dict()
    has_window = any(described.get(name) for name in WINDOWS)
    if not has_window or find_llama_weights(model, merge=False) is None:
        return []
    twin = build_twin(model, Decoding.TORCH, window=SHORT)
    batch = open_decode_batch(twin, {}, [*PROMPTS, PROMPTS[0]], 2, MIN_DECODE_STEPS)
    return [_measure_difference(twin, batch)]


@torch.no_grad()
def can_decode_natively(language_model: LanguageModel) -> bool:
    """Return True if the compiled program gives this model's samples, scores and gradients.

    The names of the weights must match. Then two comparisons with transformers' modules decide: on
    a twin model, on which short texts cross each threshold of the config, and on the model itself
    with all of its layers.
    """
    model = language_model.model
    if language_model.device.type != "cpu" or not language_model.is_exact:
        return False
    weights = find_llama_weights(model, merge=False)
    if weights is None or load_library() is None or not _has_native_twin(model):
        return False
    # Texts that are too short to repay the packing of a step are read by the model's modules.
    if language_model.max_packed_tokens < max(map(len, PROMPTS)) + MIN_DECODE_STEPS:
        return False
    tried = replace(language_model, decoding=Decoding.NATIVE)
    maps = [weight for layer in weights.layers for weight in layer.values()]
    packed_bytes = sum(weight.nbytes for weight in maps)
    # A shard does not decode with the step, which would read addresses of weights in other
    # processes.
    is_shard = any(isinstance(weight, DTensor) for weight in maps)
    is_scored = is_shard or packed_bytes > MAX_PACKED_BYTES
    measure = _measure_scores if is_scored else _measure_native_step
    difference = measure(tried)
    if not difference <= BOUND and not is_shard:
        # Many layers in float32 may round by more than the bound: float64 shows which
        # implementation is off.
        difference = measure(tried, compute_in_float64)
    if not difference <= BOUND:
        log.warning(
            f"{model.name_or_path}: the compiled program differs by {difference:.2g} nats from "
            f"{type(model).__name__}; its own modules are used, which is slower"
        )
    return difference <= BOUND


def _has_native_twin(model: PreTrainedModel) -> bool:
    """Return True if the compiled program computes the model's twin."""
    library = load_library()
    key = "" if library is None else library.name, *identify_twin(model)
    if key not in _NATIVE_TWINS:
        twin = build_twin(model, Decoding.NATIVE)
        differences = (
            measure(twin) for measure in (_measure_native_step, _measure_scores, _measure_gradients)
        )
        _NATIVE_TWINS[key] = bool(twin.max_packed_tokens) and all(
            difference <= BOUND for difference in differences
        )
    return _NATIVE_TWINS[key]


_NATIVE_TWINS: dict[tuple[str, type[PreTrainedModel], str], bool] = {}
"""The cached results of `_has_native_twin`: a process loads many models of one architecture."""


def choose_decoding(language_model: LanguageModel, wish: str) -> Decoding:
    """Choose how a model decodes, given the recipe's `auto`, `native`, `graph` or `torch`.

    The result is torch if the requested implementation is not available.
    """
    if wish in ("auto", "native") and can_decode_natively(language_model):
        return Decoding.NATIVE
    if wish in ("auto", "graph") and language_model.device.type == "cuda":
        return find_graph(language_model)
    return Decoding.TORCH


@torch.no_grad()
def find_graph(language_model: LanguageModel) -> Decoding:
    """Return the static step that works for this model on its device, or `TORCH` if none does.

    Three models are sampled from: a twin, as in `can_decode_natively`; a twin with the head width,
    device and dtype of this model, because kernels may refuse any of these; and the model itself.
    """
    model = language_model.model
    weights = find_llama_weights(model, merge=False)
    if weights is None:
        return Decoding.TORCH
    twin = build_twin(model, Decoding.MASKED_GRAPH)
    if not twin.max_packed_tokens or not _measure_sampling(twin) <= BOUND:
        return Decoding.TORCH
    for decoding in list_graphs(language_model, weights.head_width):
        modules: Any = shrink(model, weights.head_width)
        modules = modules.to(language_model.device, model.dtype)
        probe = replace(language_model, model=modules, vocab_size=VOCABULARY, decoding=decoding)
        try:
            difference = _measure_sampling(enable_packing(probe))
            bound = 1e-3 if language_model.is_exact else 0.05
            if difference <= bound:
                # Capturing a graph of the model itself would take seconds.
                itself = replace(language_model, decoding=decoding)
                difference = _measure_sampling(itself, run_eagerly)
                bound = BOUND if language_model.is_exact else ROUNDED_BOUND
        except RuntimeError as error:
            # A kernel does not support this use, or there is too little memory: try the next
            # implementation.
            log.warning(f"{decoding}: does not work on this device ({shorten_error(error)})")
            continue
        if difference <= bound:
            return decoding
        log.warning(f"{decoding}: log-probabilities differ by {difference:.2g} nats from torch's")
    return Decoding.TORCH


def _measure_sampling(language_model: LanguageModel, capture: Capture | None = None) -> float:
    """Return the largest difference of sampled tokens' log-probabilities from a forward pass.

    A text's difference is the mean over its tokens. The result is infinite if no text is short
    enough for the static program. `capture` replaces the device's capture function.
    """
    room = language_model.max_packed_tokens - SAMPLED_TOKENS
    prompts = [prompt for prompt in (*PROMPTS, PROMPTS[0], LONG_PROMPT) if len(prompt) <= room]
    settings = choose_settings(language_model)
    if not prompts or settings is None:
        return math.inf
    if capture is not None:
        settings = replace(settings, capture=capture)
    prompts = [_wrap(prompt, language_model) for prompt in prompts]
    requests = [SampleRequest(prompt, seed) for seed, prompt in enumerate(prompts)]
    params = SamplingParams(SAMPLED_TOKENS)
    check = stop_check(params, None)
    loop = open_static_loop(language_model, {}, requests, params, 2, check, settings)
    if loop is None:
        return math.inf
    samples = run_to_end(loop, len(requests), 2)
    texts = [
        (*prompt, *sample.tokens.tolist()) for prompt, sample in zip(prompts, samples, strict=True)
    ]
    logprobs = compute_by_forward(language_model, texts).cpu()
    differences = [
        logprobs[row, len(prompt) - 1 : len(text) - 1].gather(1, sample.tokens[:, None])[:, 0]
        - sample.policy_logprobs
        for row, (prompt, text, sample) in enumerate(zip(prompts, texts, samples, strict=True))
    ]
    return torch.stack([difference.abs().mean() for difference in differences]).max().item()


def _measure_native_step(
    language_model: LanguageModel, compute: Forward = compute_by_forward
) -> float:
    """Return the difference of the compiled step after a compiled prefill."""
    prompts = [_wrap(prompt, language_model) for prompt in (*PROMPTS, PROMPTS[0])]
    batch = open_decode_batch(language_model, {}, prompts, 2, MIN_DECODE_STEPS)
    assert isinstance(batch, SlotDecodeBatch), "these prompts can be packed"
    return _measure_difference(language_model, batch, compute)


def _measure_scores(language_model: LanguageModel, compute: Forward = compute_by_forward) -> float:
    """Return the largest difference of packed texts' log-probabilities from a forward pass."""
    texts = _list_texts(language_model)
    hidden = compute_hidden_states(language_model, [ScoreRequest(t[:1], t[1:]) for t in texts])
    packed = language_model.head().logprobs(hidden)
    return _compare(packed, _predict_separately(language_model, texts, compute))


@torch.enable_grad()
def _measure_gradients(language_model: LanguageModel) -> float:
    """Return the relative gradient difference between packed texts and a forward pass."""
    texts = _list_texts(language_model)
    weights = list(language_model.model.parameters())
    targets = torch.tensor([token for text in texts for token in text[1:]])
    hidden = compute_hidden_states(language_model, [ScoreRequest(t[:1], t[1:]) for t in texts])
    packed = language_model.head().logprobs(hidden)
    alone = _predict_separately(language_model, texts)
    gradients = [
        torch.cat([part.flatten() for part in torch.autograd.grad(total, weights)])
        for total in (rows.gather(1, targets[:, None]).sum() for rows in (packed, alone))
    ]
    return ((gradients[0] - gradients[1]).norm() / gradients[1].norm()).item()


def _open_batches(language_model: LanguageModel) -> Iterator[DecodeBatch]:
    """Yield a decode batch of each kind that sampling may use: slots, padded, or both."""
    prompts = [_wrap(prompt, language_model) for prompt in (*PROMPTS, PROMPTS[0])]
    longest = max(map(len, prompts)) + len(ANSWER)
    prepacked = PrepackedModel(language_model, len(ANSWER))
    job = DecodeJob(language_model, {}, prepacked, prompts, 2, longest)
    if longest <= language_model.max_packed_tokens:
        yield SlotDecodeBatch(job, SlotStep(job))
    if language_model.max_packed_tokens < language_model.context_length:
        yield PaddedDecodeBatch(job)


def _measure_difference(
    language_model: LanguageModel, batch: DecodeBatch, compute: Forward = compute_by_forward
) -> float:
    """Return the largest difference between decoding and a forward pass, in nats.

    At each position it is the mean difference over the tokens that would be sampled there. Two
    texts start, the first text ends, its prompt starts again in the free row if the batch refills,
    and all texts continue.
    """
    expected_logprobs = compute(language_model, _list_texts(language_model))
    tokens = torch.tensor(_wrap(ANSWER, language_model))
    differences: list[float] = []

    def compare(*rows: tuple[int, int]) -> None:
        """Compare rows with the forward pass; a row is (prompt index, tokens decoded)."""
        prompts = [prompt for prompt, _ in rows]
        positions = [len(PROMPTS[prompt]) - 1 + count for prompt, count in rows]
        expected = expected_logprobs[prompts, positions]
        decoded = torch.log_softmax(batch.logits().float(), dim=-1)
        differences.append(_compare(decoded, expected))

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
    return torch.tensor(differences).max().item()


def _compare(logprobs: Float[Tensor, "T V"], expected: Float[Tensor, "T V"]) -> float:
    """Return the largest of the mean differences over the tokens that would be sampled."""
    return (expected.exp() * (logprobs - expected).abs()).sum(dim=-1).max().item()


def _predict_separately(
    language_model: LanguageModel,
    texts: Sequence[PromptTokens],
    compute: Forward = compute_by_forward,
) -> Float[Tensor, "T V"]:
    """Return the log-probabilities of each text after its first tokens, by a forward pass."""
    logprobs = compute(language_model, texts)
    return torch.cat([row[: len(text) - 1] for row, text in zip(logprobs, texts, strict=True)])


def _list_texts(language_model: LanguageModel) -> list[PromptTokens]:
    return [_wrap((*prompt, *ANSWER), language_model) for prompt in PROMPTS]


def _wrap(tokens: PromptTokens, language_model: LanguageModel) -> PromptTokens:
    return tuple(token % language_model.vocab_size for token in tokens)
