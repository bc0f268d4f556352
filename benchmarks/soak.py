"""Load the service for minutes with many clients, a trainer and a vandal: failures, waiting times and memory.

    python -m benchmarks soak [--seconds 185] [--clients 48]

Clients alternate between sampling and scoring, each waiting for its answer. The trainer learns, steps, publishes samplers in flight
and saves. The vandal sends invalid requests and cancels its valid ones. The server is a separate process with two tiny models.
A status of 500 or more is a failure of the server and ends the benchmark with exit code 1. Memory is the server's memory after a
third of the time, when its caches are warm, and at the end.
"""

import contextlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks import models
from benchmarks.measuring import (
    build_parser,
    build_reading,
    format_table,
    open_session,
    round_digits,
)
from benchmarks.service import serve_models
from practicum.server.requests import MAX_TEMPERATURE, MIN_TEMPERATURE
from practicum.server.wire import PROTOBUF, load_messages

SHAPE = models.SHAPES["tiny"]
WARM = 1 / 3
"""Of the time, after which memory is read for the first time."""

DEEP = b'{"user_metadata": ' + b"[" * 5000 + b"]" * 5000 + b"}"
BAD = (
    ("asample", b"{", "application/json"),
    ("asample", DEEP, "application/json"),
    (
        "asample",
        b'{"prompt": {"chunks": [{"tokens": [NaN]}]}, "sampling_params": {}}',
        "application/json",
    ),
    (
        "asample",
        b'{"base_model": "teacher", "prompt": {"chunks": [{"tokens": [2]}]}, "sampling_params": {"temperature": 1e-40}}',
        "application/json",
    ),
    (
        "create_model",
        b'{"session_id": "../..", "model_seq_id": 0, "base_model": "../../etc"}',
        "application/json",
    ),
    ("weights_info", b'{"tinker_path": "tinker://x/../../etc/passwd"}', "application/json"),
    ("retrieve_future", b'{"request_id": "none"}', "application/json"),
    ("forward_backward", b"\xff\xff", "application/x-protobuf"),
    ("nothing", b"", "application/json"),
)


EXTREME_TEMPERATURES = (0.0, MIN_TEMPERATURE, MAX_TEMPERATURE)
"""Temperatures that are served, in one batch with the requests of other clients."""


class Load:
    """The state that all clients share: the address, the time to stop, and the answers."""

    def __init__(self, address: str, seconds: float) -> None:
        self.address = address
        self.until = time.monotonic() + seconds
        self.statuses: Counter[int] = Counter()
        self.waits: dict[str, list[float]] = {}
        self._lock = threading.Lock()

    @property
    def goes_on(self) -> bool:
        """Return True while there is time left."""
        return time.monotonic() < self.until

    def time_work(self, name: str, work: Callable[[], object]) -> None:
        """Note the seconds of the clock that some work takes."""
        start = time.monotonic()
        work()
        with self._lock:
            self.waits.setdefault(name, []).append(time.monotonic() - start)

    def note(self, status: int) -> None:
        """Count an answer."""
        with self._lock:
            self.statuses[status] += 1


class Client:
    """One connection; every answer is counted."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.http = httpx.Client(base_url=load.address, timeout=300)

    def close(self) -> None:
        """Let go of the connection."""
        self.http.close()

    def send(self, name: str, body: bytes, kind: str = "application/json") -> httpx.Response:
        """Send a body without changes."""
        response = self.http.post(f"/api/v1/{name}", content=body, headers={"content-type": kind})
        self.load.note(response.status_code)
        return response

    def ask(self, name: str, **body: Any) -> dict[str, Any]:
        """Send JSON and read JSON."""
        return self.send(name, json.dumps(body).encode()).json()

    def wait(self, reply: dict[str, Any]) -> httpx.Response:
        """Fetch the answer to an earlier request."""
        while True:
            answer = self.send(
                "retrieve_future", json.dumps({"request_id": reply["request_id"]}).encode()
            )
            if b"try_again" not in answer.content[:40]:
                return answer


def run_sampling_client(load: Load, number: int) -> None:
    """Sample and score in turn until the time is over."""
    with contextlib.closing(Client(load)) as client:
        _sample(client, load, random.Random(number))


def _sample(client: Client, load: Load, draw: random.Random) -> None:
    while load.goes_on:
        tokens = [draw.randrange(2, SHAPE.vocabulary) for _ in range(draw.randrange(4, 64))]
        score = draw.random() < 0.5
        body = {
            "prompt": {"chunks": [{"tokens": tokens}]},
            "sampling_params": {"max_tokens": 1 if score else draw.choice((2, 16, 32))},
            "prompt_logprobs": score,
            "num_samples": 1 if score else draw.randrange(1, 5),
            "base_model": draw.choice(("student", "teacher")),
        }
        load.time_work(
            "score" if score else "sample",
            lambda body=body: client.wait(client.ask("asample", **body)),
        )


def run_trainer(load: Load) -> None:
    """Learn, step, publish and save until the time is over."""
    with contextlib.closing(Client(load)) as client:
        _train(client, load)


def _train(client: Client, load: Load) -> None:
    numbers = iter(range(10**9))
    owner = client.ask("create_session", tags=[])["session_id"]
    lora = {"rank": 8}
    made = client.ask(
        "create_model", session_id=owner, model_seq_id=0, base_model="student", lora_config=lora
    )
    model = client.wait(made).json()["model_id"]
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        request = load_messages().ForwardBackwardRequest(
            model_id=model, seq_id=next(numbers), loss_fn="cross_entropy"
        )
        for _ in range(8):
            tokens = torch.randint(
                2, SHAPE.vocabulary, (48,), generator=generator, dtype=torch.int32
            )
            datum = request.data.add()
            datum.model_input.add().encoded_text.tokens = tokens.numpy().tobytes()
            target = datum.loss_fn_inputs["target_tokens"]
            target.dtype, target.dense = (
                load_messages().DTYPE_INT32,
                tokens.roll(-1).numpy().tobytes(),
            )
        gradient_request = client.send(
            "forward_backward", request.SerializeToString(), PROTOBUF
        ).json()
        step_request = client.ask(
            "optim_step", model_id=model, seq_id=next(numbers), adam_params={}
        )
        client.wait(gradient_request)
        client.wait(step_request)

    load.time_work("train step", step)  # one at least, however little time there is
    while load.goes_on:
        load.time_work("train step", step)
        number = next(numbers)
        saved = {
            "model_id": model,
            "seq_id": number,
            "sampling_session_seq_id": number,
            "kind": "inflight",
        }
        sampler = client.wait(client.ask("save_weights_for_sampler", **saved)).json()[
            "sampling_session_id"
        ]
        request = {"prompt": {"chunks": [{"tokens": [2, 3]}]}, "sampling_params": {"max_tokens": 4}}
        client.wait(client.ask("asample", sampling_session_id=sampler, seq_id=0, **request))
        if number % 10 == 0:
            client.wait(
                client.ask(
                    "save_weights",
                    model_id=model,
                    path="newest",
                    overwrite=True,
                    seq_id=next(numbers),
                )
            )


def run_vandal(load: Load) -> None:
    """Send what has to be refused, ask for a great deal and cancel it, until the time is over."""
    with contextlib.closing(Client(load)) as client:
        _break(client, load, random.Random(-1))


def _break(client: Client, load: Load, draw: random.Random) -> None:
    while load.goes_on:
        client.send(*draw.choice(BAD))
        much = {
            "prompt": {"chunks": [{"tokens": [2]}]},
            "sampling_params": {
                "max_tokens": 200,
                "temperature": draw.choice(EXTREME_TEMPERATURES),
            },
            "num_samples": 256,
        }
        reply = client.ask("asample", base_model="teacher", **much)
        time.sleep(0.5)
        client.ask("cancel_future", request_id=reply["request_id"])


def soak(seconds: float, clients: int) -> dict[str, Any]:
    """Return the number of answers in these seconds, their waiting times, and the server's memory."""
    with tempfile.TemporaryDirectory() as folder:
        load_messages()  # in one thread: importing in several at once is not safe under Python 3.11
        words = []
        for seed, name in enumerate(("student", "teacher")):
            models.write_folder(SHAPE, Path(folder) / name, seed)
            words.append(f"{name}={Path(folder) / name}")
        with serve_models(Path(folder), words) as (http, process):
            load = Load(str(http.base_url), seconds)
            works = [
                lambda number=number: run_sampling_client(load, number) for number in range(clients)
            ]
            works += [lambda: run_trainer(load), lambda: run_vandal(load)]
            failures: list[BaseException] = []
            threads = [
                threading.Thread(target=_run_catching, args=(work, failures), daemon=True)
                for work in works
            ]
            for thread in threads:
                thread.start()
            time.sleep(seconds * WARM)
            warm = read_resident(process)
            for thread in threads:
                thread.join(seconds + 300)
            end = read_resident(process)
        if failures:
            raise failures[0]
    waits = {name: _compute_quantiles(values) for name, values in sorted(load.waits.items())}
    broken = sum(count for status, count in load.statuses.items() if status >= 500)
    return {
        "requests": load.statuses.total(),
        "broken": broken,
        "statuses": dict(sorted(load.statuses.items())),
        "waits": waits,
        "warm_mib": warm,
        "end_mib": end,
    }


def read_resident(process: int) -> float:
    """Return what a process holds in memory, in MiB (Linux)."""
    status = Path(f"/proc/{process}/status").read_text()
    return (
        next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        / 1024
    )


def _run_catching(work: Callable[[], None], failures: list[BaseException]) -> None:
    try:
        work()
    except Exception as error:  # the thread cannot tell otherwise
        failures.append(error)


def _compute_quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": round_digits(statistics.median(ordered)),
        "p99": round_digits(ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]),
    }


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument("--seconds", type=float, help="of load (default 185, with --quick 15)")
    parser.add_argument(
        "--clients", type=int, help="that sample and score (default 48, with --quick 8)"
    )
    options = parser.parse_args()
    session = open_session("soak", options)
    seconds = options.seconds or (15 if options.quick else 185)
    figures = soak(seconds, options.clients or (8 if options.quick else 48))
    rows = [
        [name, wait["count"], wait["p50"], wait["p99"]] for name, wait in figures["waits"].items()
    ]
    print(format_table(["waited for", "count", "p50 s", "p99 s"], rows))
    print(
        f"{figures['requests']} requests, {figures['broken']} broken; {figures['warm_mib']:.0f} MiB, then {figures['end_mib']:.0f}"
    )
    memory = {
        "warm": build_reading(figures.pop("warm_mib")),
        "end": build_reading(figures.pop("end_mib")),
    }
    session.report({}, seconds=seconds, memory_mib=memory, **figures)
    if figures["broken"]:
        sys.exit(f"{figures['broken']} requests were answered with a status of 500 or more")


if __name__ == "__main__":
    main()
