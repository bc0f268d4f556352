"""`practicum probe`: find out which signals a server can give as a teacher."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from practicum.cli.probe_service import find_service, render_teacher
from practicum.core.randomness import seed_of
from practicum.core.waits import show_wait
from practicum.errors import CapabilityError, RecipeError, TeacherError
from practicum.models.config import ScorerConfig
from practicum.objective import EVERY_SIGNAL, Capabilities, Full, Sampled, TopK
from practicum.ports import Model
from practicum.runs.opening import load_model
from practicum.studies.doctor import SHOWN_METHODS, AllowedMethods, find_allowed_methods
from practicum.teachers.openai_api import Config
from practicum.teaching.checks import find_other_texts
from practicum.teaching.comparison import ModelComparison, ScoredText, compare_scores
from practicum.teaching.probe import Probe, build_canary, probe
from practicum.teaching.remote import RemoteClient, ServerGenerator, ServerLimits
from practicum.teaching.served import open_server
from practicum.types import SampleRequest, SamplingParams, ScoreRequest

LARGEST_K = 256
"""The largest k that is tried."""

TEXTS, TOKENS = 8, 32
"""The number of texts that the folder writes for a comparison, and the tokens of each."""

COMPARED_K = 20
"""The candidates that are compared at each token; vLLM's own limit."""


def print_probe(url: str, folder: str | None, *, as_json: bool, **fields: Any) -> None:
    """Probe a server, compare it with a model folder if there is one, and print the results.

    Raises TeacherError after the results if the server is not the folder's model.
    """
    config = _build_config(url, fields)
    service = find_service(open_server(config), url)
    if service is not None:
        if folder is not None:
            raise CapabilityError(
                f"{url}: a service of the Tinker API is not compared with a folder; a run compares the "
                "vocabularies if teacher.tokenizer names the folder"
            )
        print(json.dumps(service.to_json()) if as_json else "\n".join(service.render_lines()))
        return
    if folder is None:
        result, comparison = probe_server(url, **fields), None
    else:
        result, comparison = compare_with_folder(url, folder, **fields)
    if as_json:
        print(json.dumps(to_json(result, comparison)))
    else:
        lines = [*result.render_lines(), *find_methods(result).render_lines(SHOWN_METHODS)]
        lines += [
            *(comparison.render_lines() if comparison else []),
            *_render_teacher(result, config),
        ]
        print("\n".join(lines))
    if comparison is not None and not comparison.is_same:
        raise TeacherError(
            f"{url}: the server is not {folder}: {comparison.verdict}; serve this folder, or "
            "compare with the served model"
        )


def _render_teacher(result: Probe, config: Config) -> list[str]:
    """Return the lines of a recipe that uses the server as teacher."""
    settings: dict[str, object] = {"type": "openai_api", "url": config.url, "model": result.model}
    if result.dialect is not None:
        settings |= {"dialect": result.dialect.name, "largest_k": result.largest_k}
    else:
        settings |= {"dialect": "chat"}
    if config.api_key_env is not None:
        settings |= {"api_key_env": config.api_key_env}
    return render_teacher(settings)


def probe_server(url: str, **fields: Any) -> Probe:
    """Probe the server at an address; `fields` are settings of an `openai_api` teacher."""
    config = _build_config(url, fields)
    return probe(open_server(config), config.dialect, config.model, LARGEST_K, None)


def compare_with_folder(url: str, folder: str, **fields: Any) -> tuple[Probe, ModelComparison]:
    """Probe a server and compare its log-probabilities with the scores of a model folder.

    Raises CapabilityError if the server returns no log-probabilities.
    """
    config = _build_config(url, fields)
    http = open_server(config)
    # Open the server before two models load, so that a wrong address fails early.
    with show_wait(f"reading {folder}"):
        model = load_model(ScorerConfig(model=folder, dtype="float32"))
    vocabulary = model.renderer.vocab_size
    # The comparison itself finds and measures a shift by one position.
    result = probe(http, config.dialect, config.model, LARGEST_K, vocabulary, must_align=False)
    if result.dialect is None or result.canary is None:
        raise CapabilityError(
            f"{http.address}: it gives no log-probabilities, so nothing can be compared with {folder}"
        )
    requests = _write_texts(model, result.context)
    k = min(result.largest_k, COMPARED_K)
    signal = TopK(k=k, support="teacher") if k else Sampled()
    capabilities = Capabilities(frozenset({"sampled", "topk"}), frozenset({"teacher"}), k)
    generator = ServerGenerator(http, result.model, model.renderer, ServerLimits())
    client = RemoteClient(generator, result, result.dialect, capabilities, vocabulary)
    served = client.score(requests, signal)
    texts = [
        ScoredText(*scored, answer)
        for scored, answer in zip(_score_locally(model, requests), served, strict=True)
    ]
    rounding = _measure_rounding(folder, requests, texts)
    mismatch = find_other_texts(result.texts or {}, model.renderer.tokenizer, http)
    return result, compare_scores(texts, rounding, mismatch)


def _build_config(url: str, fields: dict[str, Any]) -> Config:
    """Return the settings of an `openai_api` teacher; raises RecipeError if one is wrong."""
    try:
        # A user waits at the terminal, so a server that does not answer is reported soon.
        return Config(url=url, retry_seconds=5.0, **fields)
    except ValidationError as error:
        raise RecipeError(
            [str(entry["msg"]).removeprefix("Value error, ") for entry in error.errors()]
        ) from None


def _write_texts(model: Model, context: int | None) -> list[ScoreRequest]:
    """Return texts that the model writes at temperature 1 after parts of the canary."""
    canary = build_canary(model.renderer.vocab_size).tokens
    # The server's context needs room for one more token, which it must generate.
    room = TOKENS if context is None else min(TOKENS, context - TEXTS - 1)
    prompts = [canary[number : 2 * number + 1] for number in range(TEXTS)]
    samples = model.client.sample(
        [SampleRequest(prompt, seed_of("compare", n)) for n, prompt in enumerate(prompts)],
        SamplingParams(room),
    )
    return [
        ScoreRequest(prompt, tuple(sample.tokens.tolist()))
        for prompt, sample in zip(prompts, samples, strict=True)
    ]


def _score_locally(model: Model, requests: Sequence[ScoreRequest]) -> list[tuple[Tensor, Tensor]]:
    """Return the tokens of each text, and the model's log-probabilities [T, V] at them."""
    scored = []
    for request, signal in zip(requests, model.client.score(requests, Full()), strict=True):
        states, head = signal.states, signal.head
        assert states is not None and head is not None
        scored.append((torch.tensor(request.tokens), head.logprobs(states).cpu()))
    return scored


def _measure_rounding(
    folder: str, requests: Sequence[ScoreRequest], texts: Sequence[ScoredText]
) -> float:
    """Return the mean difference in nats that computing in bfloat16 makes to the texts' scores."""
    with show_wait(f"reading {folder} in bfloat16"):
        rounded = load_model(ScorerConfig(model=folder, dtype="bfloat16"))
    signals = rounded.client.score(requests, Sampled())
    gaps = [
        (signal.logprobs - text.own).abs()
        for signal, text in zip(signals, texts, strict=True)
        if signal.logprobs is not None
    ]
    return float(torch.cat(gaps).mean())


def find_methods(result: Probe) -> AllowedMethods:
    """Return the published methods that the server allows as a teacher, with a verifier."""
    if result.dialect is None:
        return find_allowed_methods(Capabilities(frozenset(), frozenset(), largest_k=0))
    if not result.largest_k:
        return find_allowed_methods(Capabilities(frozenset({"sampled"}), frozenset(), largest_k=0))
    if result.writes_states:
        return find_allowed_methods(EVERY_SIGNAL)
    supports = frozenset({"teacher", "student"} if result.names else {"teacher"})
    signals = Capabilities(frozenset({"sampled", "topk"}), supports, largest_k=result.largest_k)
    return find_allowed_methods(signals)


def to_json(result: Probe, comparison: ModelComparison | None = None) -> dict[str, object]:
    """Return the results of the probe, and of a comparison if any, as JSON data."""
    compared: dict[str, object] = {} if comparison is None else {"against": asdict(comparison)}
    return compared | {
        "model": result.model,
        "models": list(result.models),
        "dialect": "chat" if result.dialect is None else result.dialect.name,
        "sampled": result.dialect is not None,
        "largest_k": result.largest_k,
        "full": result.writes_states,
        "students_candidates": result.names,
        "context": result.context,
        "follows_temperature": result.tempered,
        "noise_alone": result.noise[0],
        "noise_in_company": result.noise[1],
        "token_ids": result.token_ids,
        "seconds": result.seconds,
        "bytes_a_token": {"sampled": result.wire[0], "largest_k": result.wire[1]},
        "launch": None if result.dialect is None else result.dialect.launch,
        "states_launch": None if result.dialect is None else result.dialect.states_launch,
        "canary": result.canary_sum,
        "methods": find_methods(result).to_json(),
    }
