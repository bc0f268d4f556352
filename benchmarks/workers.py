"""Measure trainers over shards, requests to the processes of a cluster, and tensors by reference.

    python -m benchmarks workers [--quick]

*Two workers* learn from twice the tokens of one worker, each with a shard of the same student (17 million weights, 49,152 tokens);
learned tokens per processor second of all workers are compared, in alternating rounds. *An empty step* is eight requests to two
processes that do nothing, as a step sends them: weights, rollouts, scores, an update, a step of the optimizer. *References* are
hidden states of one process that a second process reads; the wall-clock time is from its request to the last copy.
"""

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import models
from benchmarks.goals import SPREAD
from benchmarks.measuring import (
    build_parser,
    compute_ratios,
    format_table,
    open_session,
    run_in_process,
    spread,
)
from benchmarks.scaling import make_rollout
from practicum.objective import Full, Objective
from practicum.ports import AdamParams
from practicum.training.loop import assemble
from practicum.types import ScoreRequest

REQUESTS = 8
"""The requests of a step."""

UPDATES = 3
"""The updates of one measurement, after one that is not counted."""

WIDTH = 4096
"""The width of the hidden states that are sent."""


def main() -> None:
    """Report one line."""
    parser = build_parser(__doc__)
    parser.add_argument("--ranks", type=int, help="internal: number of workers to measure")
    options = parser.parse_args()
    if options.ranks:
        print(json.dumps({"tokens_a_second": _measure_update(options.ranks, options.quick)}))
        return
    session = open_session("workers", options)
    quick = ["--quick"] * options.quick
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for number in range(session.rounds):
        for ranks in (1, 2) if number % 2 == 0 else (2, 1):
            answer = run_in_process("benchmarks.workers", "--ranks", str(ranks), *quick)
            speeds[ranks].append(answer["tokens_a_second"])
    requests, references = _measure_cluster(session.rounds, mib=8 if options.quick else 192)
    readings = {
        "workers.share": compute_ratios(speeds[2], speeds[1]),
        "workers.empty": spread(requests),
        "workers.references": spread(references),
    }
    medians = {ranks: round(statistics.median(speed)) for ranks, speed in speeds.items()}
    rows = [[name, reading["median"]] for name, reading in readings.items()]
    print(format_table(["measure", "median"], rows))
    print(describe_rounds(readings["workers.share"], session.load, os.getloadavg()[0]))
    session.report(readings, tokens_a_second=medians)


def describe_rounds(reading: Mapping[str, float], before: float, after: float) -> str:
    """Return whether the rounds of a reading are close enough for a verdict, and the load average."""
    word = "calm" if reading["spread"] <= SPREAD else "not calm"
    return (
        f"{reading['count']:.0f} rounds, {word}: {reading['spread']:.0%} apart, calm up to "
        f"{SPREAD:.0%}; load average {before:.1f} before and {after:.1f} after"
    )


def _measure_update(ranks: int, quick: bool) -> float:
    """Return the learned tokens per processor second of all workers together."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        arguments = (ranks, Path(folder) / "store", quick, answers)
        workers = [
            context.Process(target=_run_worker, args=(rank, *arguments)) for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        seconds = [answers.get() for _ in workers]
        for worker in workers:
            worker.join()
    tokens, _ = seconds[0]
    # The workers update in parallel: the processor time of an update is the sum over all workers.
    return round(tokens / statistics.median(map(sum, zip(*(s for _, s in seconds), strict=True))))


def _run_worker(rank: int, ranks: int, store: Path, quick: bool, answers: Any) -> None:
    """Learn as one of the workers, and answer the tokens and the seconds of each update."""
    from practicum.backends._sharded.building import build_sharded_trainer, put_in_shards
    from practicum.backends.local.device_limits import TrainerLimits

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    names = ("tiny", "tiny-teacher") if quick else ("17m", "57m")
    student, teacher = (models.SHAPES[name] for name in names)
    model = models.build_language_model(student)
    model.model.requires_grad_(True)
    rollouts = [make_rollout(student, number) for number in range((4 if quick else 16) * ranks)]
    requests = [ScoreRequest(item.prompt_tokens, tuple(item.tokens.tolist())) for item in rollouts]
    scorer = models.build_sampler(models.build_language_model(teacher, 1), 8)
    batch = assemble(rollouts, scorer.score(requests, Full()))
    trainer, _ = build_sharded_trainer(put_in_shards(model), TrainerLimits())
    seconds, supervised = [], 0.0
    for number in range(1 + UPDATES):
        dist.barrier()
        start = time.process_time()
        supervised = trainer.forward_backward(batch, Objective(), number).metrics["supervised"]
        trainer.optim_step(AdamParams(1e-4))
        seconds.append(time.process_time() - start)
    answers.put((supervised, seconds[1:]))
    dist.barrier()
    dist.destroy_process_group()


class _Holder:
    """A process that holds hidden states, or reads the states of another process."""

    def __init__(self) -> None:
        self._states: Any = None

    def fill(self, rows: int) -> None:
        """Draw the states, so that drawing them is not measured."""
        self._states = torch.randn(rows, WIDTH)

    def send(self) -> tuple[int, Any]:
        """Return the states by reference."""
        from practicum.backends.ray.references import PackedTensor

        return len(self._states), PackedTensor.from_tensor(self._states)

    def read(self, states: Any) -> int:
        """Copy the states of another process."""
        return len(states.fetch())

    def idle(self) -> None:
        """Do nothing."""


def _measure_cluster(rounds: int, mib: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of empty steps, and gigabytes a second by reference."""
    import ray

    from practicum.backends.ray.calls import AnswerLimits, wait_for
    from practicum.backends.ray.placement import RayCluster
    from practicum.backends.ray.references import RayStates
    from practicum.models.config import ModelConfig

    limits, rows = AnswerLimits(60.0, 0), mib * 2**20 // (4 * WIDTH)
    with ExitStack() as at_end:
        starter = RayCluster(at_end).reserve(_Holder, 2, ModelConfig(model="none", device="cpu"))
        sender, reader = starter.start(), starter.start()
        ray.get(sender.fill.remote(rows))
        empty, speeds = [], []
        for number in range(1 + rounds):
            start = time.monotonic()
            for _ in range(REQUESTS):
                wait_for({"a": sender.idle.remote(), "b": reader.idle.remote()}, "idle", limits)
            middle = time.monotonic()
            length, states = sender.send.options(num_returns=2).remote()
            wait_for({"sender": length}, "send", limits)
            wait_for(
                {"reader": reader.read.remote(RayStates(states, 0, rows, True))}, "read", limits
            )
            end = time.monotonic()
            if number:
                empty.append(1000 * (middle - start))
                speeds.append(rows * WIDTH * 4 / 1e9 / (end - middle))
            del states
        return empty, speeds


if __name__ == "__main__":
    main()
