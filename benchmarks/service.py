"""Compare the service with the same model in this process: scored tokens per second, and the overhead of a request.

    python -m benchmarks service [--texts 32] [--tokens 128] [--model 17m]

The server is a separate process and gets the requests of a real client: one request per text, all in parallel or in sequence.
Processor seconds are compared: of the server for the service, of this process for the local teacher. Wall seconds are in the JSON
line; they include the client's work, waiting, and other work on the machine.

Then the same is measured through our own clients, teacher `tinker` and backend `tinker`, with the processor seconds of both
processes: the scored texts, and one update of a student with adapters.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch

from benchmarks import models
from benchmarks.measuring import (
    build_parser,
    build_timer,
    compute_ratios,
    format_table,
    interleave,
    open_session,
    spread,
)
from practicum.backends.local.hosted import add_shared_adapters
from practicum.backends.local.loading import load
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer
from practicum.backends.tinker import ServiceTrainer
from practicum.models.config import Lora, ModelConfig
from practicum.objective import Objective, Sampled, Term
from practicum.ports import AdamParams, TrainingClient
from practicum.remote.tinker import Connection, ServiceConfig, ServiceSampler
from practicum.types import Datum, Prompt, Rollout, ScoreRequest, TeacherSignal

AT_ONCE = 16
"""Connections of the client."""

RANK = 16
"""Of the student's adapters."""


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument("--texts", type=int, help="texts of a batch (default 32, with --quick 8)")
    parser.add_argument("--tokens", type=int, help="tokens of each (default 128, with --quick 32)")
    parser.add_argument(
        "--model", choices=sorted(models.SHAPES), help="shape (default 17m, with --quick tiny)"
    )
    options = parser.parse_args()
    options.texts = options.texts or (8 if options.quick else 32)
    options.tokens = options.tokens or (32 if options.quick else 128)
    shape = models.SHAPES[options.model or ("tiny" if options.quick else "17m")]
    session = open_session("service", options)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(
        2, shape.vocabulary, (options.texts, options.tokens), generator=generator
    ).tolist()
    with tempfile.TemporaryDirectory() as folder:
        models.write_folder(shape, Path(folder) / "model", 0)
        local = LocalSampler(
            load(ModelConfig(model=str(Path(folder) / "model"), device="cpu")).language_model
        )
        with serve_models(Path(folder), [f"model={Path(folder) / 'model'}"]) as (http, process):
            clock: dict[str, list[float]] = {}

            def time_server(name: str, work: Callable[[], object]) -> Callable[[], float]:
                def run_timed() -> float:
                    before, start = _read_processor_seconds(process), time.perf_counter()
                    work()
                    clock.setdefault(name, []).append(time.perf_counter() - start)
                    return _read_processor_seconds(process) - before

                return run_timed

            def time_both(work: Callable[[], object]) -> Callable[[], float]:
                def run_timed() -> float:
                    before = _read_processor_seconds(process) + time.process_time()
                    work()
                    return _read_processor_seconds(process) + time.process_time() - before

                return run_timed

            connection = Connection(ServiceConfig(url=str(http.base_url)), "benchmark")
            teacher = ServiceSampler(
                connection,
                lambda service: service.create_sampling_client(base_model="model"),
                shape.vocabulary,
            )
            student = ServiceTrainer(
                connection,
                "model",
                lambda service: service.create_lora_training_client(
                    base_model="model", rank=RANK, train_unembed=False
                ),
            )
            local_student = LocalTrainer(
                add_shared_adapters(local.language_model, Lora(rank=RANK), 0)
            )
            batch = _build_data(texts)
            contenders = {
                "local, one batch": build_timer(lambda: _score_locally(local, texts)),
                "service, all at once": time_server(
                    "all at once", lambda: _score_remotely(http, texts, AT_ONCE)
                ),
                "local, one by one": build_timer(
                    lambda: [_score_locally(local, [text]) for text in texts]
                ),
                "service, one by one": time_server(
                    "one by one", lambda: _score_remotely(http, texts, 1)
                ),
                "health, one by one": time_server(
                    "health", lambda: [http.get("/healthz") for _ in texts]
                ),
                "teacher tinker": time_both(lambda: _score_locally(teacher, texts)),
                "local student, an update": build_timer(lambda: _update(local_student, batch)),
                "student tinker, an update": time_both(lambda: _update(student, batch)),
            }
            times = interleave(contenders, session.rounds, session.warm_up)
            difference = _find_largest_difference(local, http, texts[:2])
            connection.close()
    count = options.texts * (options.tokens - 1)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        [name, value, "-" if name.startswith("health") else count / value]
        for name, value in medians.items()
    ]
    print(format_table(["scored by", "processor s a batch", "tokens a second"], rows))
    apart = zip(times["service, one by one"], times["local, one by one"], strict=True)
    overhead = [
        1e3 * (service_seconds - local_seconds) / options.texts
        for service_seconds, local_seconds in apart
    ]
    beside = statistics.median(overhead)
    print(
        f"{beside:.1f} ms per request in addition to the model's own work; log-probabilities differ by at most {difference:.1e}"
    )
    session.report(
        {},
        texts=options.texts,
        tokens=options.tokens,
        processor_seconds={name: spread(values) for name, values in times.items()},
        clock_seconds={name: spread(values[-session.rounds :]) for name, values in clock.items()},
        throughput=compute_ratios(times["local, one batch"], times["service, all at once"]),
        overhead_ms=spread(overhead),
        difference=difference,
    )


def _read_processor_seconds(process: int) -> float:
    """Return the processor seconds of a process so far, all threads together, in steps of about 10 ms."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serve_models(folder: Path, names: Sequence[str]) -> Iterator[tuple[httpx.Client, int]]:
    """`practicum serve` of the models on a free port until the block ends."""
    log = folder / "log"
    words = [sys.executable, "-m", "practicum", "serve", *names, "--port", "0", "--device", "cpu"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*words, "--out", str(folder / "served")], stdout=out, stderr=out, env=os.environ
        )
    try:
        while not (address := re.search(r"TINKER_BASE_URL=(\S+)", log.read_text())):
            if process.poll() is not None:
                sys.exit(log.read_text())
            time.sleep(0.05)
        limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
        with httpx.Client(base_url=address[1], timeout=300, limits=limits) as http:
            yield http, process.pid
    finally:
        process.terminate()
        process.wait()


def _build_data(texts: Sequence[Sequence[int]]) -> list[Datum]:
    """The texts as rollouts that a teacher found all tokens of equally likely."""
    batch = []
    for number, text in enumerate(texts):
        tokens = torch.tensor(text[1:])
        flat = torch.full((len(tokens),), -1.0)
        mask = torch.ones(len(tokens), dtype=torch.bool)
        prompt = Prompt(str(number), ())
        rollout = Rollout(prompt, (text[0],), tokens, mask, flat, flat, 0, "length", "")
        batch.append(Datum(rollout, TeacherSignal(logprobs=flat)))
    return batch


def _update(trainer: TrainingClient, data: Sequence[Datum]) -> None:
    trainer.forward_backward(data, Objective(losses=(Term(signal=Sampled()),)), 0)
    trainer.optim_step(AdamParams(1e-4))


def _score_locally(
    sampler: LocalSampler | ServiceSampler, texts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    requests = [ScoreRequest((text[0],), tuple(text[1:])) for text in texts]
    scores = [signal.logprobs for signal in sampler.score(requests, Sampled())]
    assert all(logprobs is not None for logprobs in scores)
    return [logprobs for logprobs in scores if logprobs is not None]


def _score_remotely(
    http: httpx.Client, texts: Sequence[Sequence[int]], at_once: int
) -> list[bytes]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda text: _score_text(http, text), texts))


def _score_text(http: httpx.Client, text: Sequence[int]) -> bytes:
    """As `compute_logprobs` of the tinker package: ask, then fetch the answer."""
    body = {
        "prompt": {"chunks": [{"tokens": list(text)}]},
        "sampling_params": {"max_tokens": 1},
        "prompt_logprobs": True,
        "base_model": "model",
    }
    reply = http.post("/api/v1/asample", content=json.dumps(body))
    reply.raise_for_status()
    while True:
        answer = http.post(
            "/api/v1/retrieve_future", json={"request_id": reply.json()["request_id"]}
        )
        answer.raise_for_status()
        if answer.headers["content-type"] == "application/x-protobuf":
            return answer.content
        assert answer.json().get("type") == "try_again", answer.text


def _find_largest_difference(
    sampler: LocalSampler, http: httpx.Client, texts: Sequence[Sequence[int]]
) -> float:
    """Between the log-probabilities of the two ways."""
    from practicum.server.wire import load_messages

    largest = 0.0
    for local, content in zip(
        _score_locally(sampler, texts), _score_remotely(http, texts, 1), strict=True
    ):
        message = load_messages().SampleResponse()
        message.ParseFromString(content)
        remote = torch.frombuffer(bytearray(message.prompt_logprobs), dtype=torch.float32)[1:]
        largest = max(largest, (local - remote).abs().max().item())
    return largest


if __name__ == "__main__":
    main()
