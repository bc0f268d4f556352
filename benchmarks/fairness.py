"""Measure the wait of a two-token request while the service handles long requests.

    python -m benchmarks fairness [--samples 1024] [--tokens 256] [--model 17m]

`practicum serve` runs as a separate process with a model with random weights. The long work is sent first: one request with many
samples, as many requests with one sample each and either one shared prompt or different prompts, or as many texts to score. In
parallel, a client repeatedly asks for two tokens, each time after its last answer, for half a minute or until the long work ends.
Seconds are measured by the wall clock, so they include other work on the machine.
"""

import json
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks import models
from benchmarks.measuring import build_parser, format_table, open_session, spread
from benchmarks.service import serve_models

PROMPT, SHORT = 64, 2
"""Tokens of a prompt, and new tokens of the short request."""


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument("--samples", type=int, help="long samples (default 1024, with --quick 64)")
    parser.add_argument("--tokens", type=int, help="tokens of each (default 256, with --quick 64)")
    parser.add_argument(
        "--model", choices=sorted(models.SHAPES), help="shape (default 17m, with --quick tiny)"
    )
    parser.add_argument("--seconds", type=float, help="of asking (default 30, with --quick 3)")
    options = parser.parse_args()
    samples = options.samples or (64 if options.quick else 1024)
    tokens = options.tokens or (64 if options.quick else 256)
    seconds = options.seconds or (3.0 if options.quick else 30.0)
    shape = models.SHAPES[options.model or ("tiny" if options.quick else "17m")]
    session = open_session("fairness", options)
    works = _build_works(samples, tokens, shape.vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        models.write_folder(shape, Path(folder) / "model", 0)
        waits = {
            name: _measure_waits(Path(folder), bodies, seconds) for name, bodies in works.items()
        }
    rows = [
        [name, len(values), spread(values)["median"], max(values)] for name, values in waits.items()
    ]
    print(format_table(["beside", "asked", "median wait, s", "longest wait, s"], rows))
    session.report(
        {}, samples=samples, tokens=tokens, waits={name: spread(w) for name, w in waits.items()}
    )


def _build_works(
    samples: int, tokens: int, vocabulary: int
) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return the long requests of each kind of work."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, vocabulary, (samples, PROMPT), generator=generator).tolist()
    texts = torch.randint(2, vocabulary, (samples, tokens), generator=generator).tolist()
    return {
        "nothing": [],
        "one request": [_ask(prompts[0], tokens, num_samples=samples)],
        "requests of one prompt": [_ask(prompts[0], tokens) for _ in range(samples)],
        "requests with separate prompts": [_ask(prompt, tokens) for prompt in prompts],
        "texts to score": [_ask(text, 1, prompt_logprobs=True) for text in texts],
    }


def _ask(prompt: Sequence[int], tokens: int, **settings: object) -> Mapping[str, Any]:
    return {
        "prompt": {"chunks": [{"tokens": prompt}]},
        "sampling_params": {"max_tokens": tokens, "seed": 1},
        "base_model": "model",
        **settings,
    }


def _measure_waits(
    folder: Path, bodies: Sequence[Mapping[str, Any]], seconds: float
) -> list[float]:
    """Return the wait of each short request during the long requests."""
    with serve_models(folder, [f"model={folder / 'model'}"]) as (http, _):
        waits: list[float] = []
        short = _ask([3] * PROMPT, SHORT)
        _fetch(http, _send(http, short))
        ids = [_send(http, body) for body in bodies]
        finished = threading.Event()

        def finish() -> None:
            for number in ids:
                _fetch(http, number)
            finished.set()

        thread = threading.Thread(target=finish)
        if ids:
            thread.start()
        end = time.monotonic() + seconds
        while not waits or (time.monotonic() < end and not finished.is_set()):
            start = time.monotonic()
            _fetch(http, _send(http, short))
            waits.append(time.monotonic() - start)
        for number in ids:
            http.post("/api/v1/cancel_future", json={"request_id": number})
        if ids:
            thread.join()
        return waits


def _send(http: httpx.Client, body: Mapping[str, Any]) -> str:
    reply = http.post("/api/v1/asample", content=json.dumps(body))
    reply.raise_for_status()
    return reply.json()["request_id"]


def _fetch(http: httpx.Client, number: str) -> None:
    while True:
        answer = http.post("/api/v1/retrieve_future", json={"request_id": number})
        if answer.status_code != 200 or "protobuf" in answer.headers["content-type"]:
            return
        if answer.json().get("type") != "try_again":
            return


if __name__ == "__main__":
    main()
