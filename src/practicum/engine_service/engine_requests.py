"""Requests and answers in vLLM's words, the same for the engine in process and at a server."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.errors import EngineError
from practicum.functional import TEACHER_FLOOR
from practicum.text import refuse_banned_ids, refuse_stop_texts
from practicum.types import Sample, SampleRequest, SamplingParams, ScoreRequest

MAX_LOGPROB = 1e-3
"""A log-probability above this is more than rounding."""


def refuse_unsupported(params: SamplingParams) -> None:
    """Raise CapabilityError if the settings ask for what tokens in and tokens out cannot do."""
    refuse_stop_texts(params, "rollout.engine 'vllm'")
    refuse_banned_ids(params, "rollout.engine 'vllm'")


def build_sampling_settings(request: SampleRequest, params: SamplingParams) -> dict[str, Any]:
    """Return vLLM's sampling parameters for one completion."""
    return {
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": request.seed,
        # No further candidates: the sampled token's log-probability is always returned.
        "logprobs": 0,
        # The stop tokens come from the student, not from the model's generation config.
        "ignore_eos": True,
        "stop_token_ids": sorted(params.stop_ids),
        "detokenize": False,
    }


def build_scoring_settings() -> dict[str, Any]:
    """Return vLLM's sampling parameters for the log-probabilities of a prompt."""
    return {
        "max_tokens": 1,
        "temperature": 1.0,
        "seed": 0,
        "prompt_logprobs": 0,
        "detokenize": False,
    }


def read_sample(
    tokens: Any,
    logprobs: Any,
    finish_reason: Any,
    params: SamplingParams,
    vocab_size: int,
) -> Sample:
    """Return a completion after checking it; raises EngineError if it cannot be right.

    vLLM's answer arrives here unchecked, so the types of tokens and log-probabilities are checked
    too. The log-probabilities belong to the sampling distribution. They also belong to the policy
    unless a setting changed the distribution; in this case `policy_logprobs` are NaN.
    """
    if finish_reason not in ("stop", "length"):
        raise _build_error(f"a completion ended with {finish_reason!r}")
    if not isinstance(tokens, Sequence) or not all(type(token) is int for token in tokens):
        raise _build_error("a completion without token ids")
    if not 1 <= len(tokens) <= params.max_new_tokens:
        raise _build_error(
            f"a completion has {len(tokens)} tokens, and 1 to {params.max_new_tokens} were asked for"
        )
    if not all(0 <= token < vocab_size for token in tokens):
        raise _build_error(f"a completion holds a token outside of the {vocab_size} of the student")
    values = check_logprobs(logprobs, len(tokens))
    is_plain = params.temperature in (0.0, 1.0) and params.top_p == 1.0 and params.top_k == 0
    return Sample(
        tokens=torch.tensor(list(tokens), dtype=torch.long),
        sampling_logprobs=values if params.temperature > 0 else torch.zeros_like(values),
        policy_logprobs=values if is_plain else torch.full_like(values, torch.nan),
        stop_reason="stop" if tokens[-1] in params.stop_ids else "length",
    )


def pick_logprobs(rows: Any, tokens: Sequence[Any]) -> list[Any]:
    """Return the log-probability of each token from the candidates at its place, None if missing."""
    if not isinstance(rows, Sequence) or len(rows) != len(tokens):
        raise _build_error(f"no list of log-probabilities for {len(tokens)} tokens")
    entries = [
        row.get(token) if isinstance(row, Mapping) else None
        for row, token in zip(rows, tokens, strict=True)
    ]
    return [None if entry is None else entry.logprob for entry in entries]


def read_scores(request: ScoreRequest, logprobs: Any) -> Float[Tensor, " T"]:
    """Select the request's tokens from the log-probabilities of the whole prompt.

    `logprobs` has an entry for each token except the first.
    """
    length = len(request.prompt_tokens) + len(request.tokens)
    return check_logprobs(logprobs, length - 1)[-len(request.tokens) :]


def check_logprobs(logprobs: Any, count: int) -> Float[Tensor, " T"]:
    """Return log-probabilities; raises EngineError unless they are finite numbers up to 0.

    A sampled token has a probability above 0, so minus infinity cannot be right either.
    """
    if not isinstance(logprobs, Sequence) or len(logprobs) != count:
        length = len(logprobs) if isinstance(logprobs, Sequence) else 0
        raise _build_error(f"{length} log-probabilities for {count} tokens")
    for value in logprobs:
        if not isinstance(value, float | int) or not math.isfinite(value) or value > MAX_LOGPROB:
            raise _build_error(f"{value!r} as a log-probability, which is a number up to 0")
    values = torch.tensor(list(logprobs), dtype=torch.float32)
    return values.clamp(min=TEACHER_FLOOR, max=0.0)


def _build_error(problem: str) -> EngineError:
    return EngineError(
        f"rollout.engine: vllm answered with {problem}; look at its log, or leave rollout.engine out"
    )
