"""Measure loss, decoding, scoring, updates and whole steps on a CUDA device, in under ten minutes on one H100 or H200.

    python -m benchmarks gpu [--record] [--only loss step] [--seconds 540] [--peer-python PATH]
    python -m benchmarks gpu --quick        # tiny sizes, also on a CPU: a test that it works

Students of the shape of Qwen3-0.6B and 4B, teachers of 4B and 8B, random weights, products in bfloat16. A measurement prints its
line when it is done, next to the figures of the last run on this device; --record stores it at once in results/gpu/DEVICE.json, so
an interrupted run keeps its lines. A measurement that fails prints its traceback, the next one begins, and the exit code is 1.
TRL's kernel is measured next to the loss, and its two trainers next to the step, where TRL is installed.
"""

import argparse
import gc
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_parts, gpu_trl, peers
from benchmarks.gpu_parts import Bench, Figures
from benchmarks.loss_kernels import Size
from benchmarks.measuring import (
    ROOT,
    Session,
    build_parser,
    build_reading,
    format_table,
    open_session,
    round_digits,
)
from practicum.backends.local.device_limits import size_gpu

FOLDER = ROOT / "results" / "gpu"
SECONDS = 540.0
"""No measurement begins after this number of seconds."""
CHUNK = size_gpu(0).chunk_tokens
"""The tokens of a loss chunk, as a run on a GPU takes them."""
NOTHING = "no CUDA device is at hand; python -m benchmarks gpu --quick runs the same at tiny sizes on the CPU"
GOALS = {
    "loss 8k": {"of_products": "gpu.loss.products", "loss_gib": "gpu.loss.memory"},
    "decode 0.6B": {"of_bandwidth": "gpu.decode"},
    "update 0.6B 8k": {"tokens_per_second": "gpu.update", "peak_gib": "gpu.update.memory"},
}
"""The goals that a measurement's figures stand against."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement: its name, the group that `--only` chooses, and what measures it."""

    name: str
    group: str
    run: Callable[[Bench, Mapping[str, float]], Figures]


def list_measurements() -> Iterator[Measurement]:
    """Yield the measurements, the most important ones first, in case the run is interrupted."""
    yield Measurement("ceilings", "ceilings", lambda b, c: gpu_parts.measure_ceilings(b, 8192))
    yield _build_loss("loss 8k", Size(8192, 151936, 1024, 4096), CHUNK)
    yield _build_update("update 0.6B 8k", "0.6B", "8B", 8192)
    yield _build_decoding("decode 0.6B", "0.6B", (64, 512, 256), "graph")
    yield _build_step("step 0.6B 4B", ("0.6B", "4B"), 64, 512, 256)
    yield _build_scoring("score 4B", "4B", 16, 2048)
    yield _build_scoring("score 8B", "8B", 16, 2048)
    for chunk in (256, 512, 2048):
        yield _build_loss(f"loss 8k by {chunk}", Size(8192, 151936, 1024, 4096), chunk)
    yield _build_step("step 4B 8B", ("4B", "8B"), 64, 512, 256, lora=True)
    yield _build_decoding("decode 4B", "4B", (64, 512, 256), "graph")
    yield _build_decoding("decode 0.6B torch", "0.6B", (64, 512, 256), "torch")
    yield _build_update("update 0.6B 64k", "0.6B", "8B", 65536)
    yield _build_loss("loss 64k", Size(65536, 151936, 1024, 4096), CHUNK)


def list_quick() -> Iterator[Measurement]:
    """Yield the same at tiny sizes."""
    yield Measurement("ceilings", "ceilings", lambda b, c: gpu_parts.measure_ceilings(b, 128))
    yield _build_loss("loss", Size(64, 512, 64, 96), 32)
    yield _build_update("update", "tiny", "tiny-teacher", 48)
    yield _build_decoding("decode", "tiny", (4, 8, 8), "graph")
    yield _build_decoding("decode torch", "tiny", (4, 8, 8), "torch")
    yield _build_scoring("score", "tiny-teacher", 3, 24)
    yield _build_step("step", ("tiny", "tiny-teacher"), 4, 8, 8)
    yield _build_step("step lora", ("tiny", "tiny-teacher"), 4, 8, 8, lora=True)


def list_trl(python: str, *, quick: bool = False) -> Iterator[Measurement]:
    """Yield the steps of TRL's two trainers, in the environment of a Python that has it."""
    pair, sizes = (("0.6B", "4B"), (64, 512, 256))
    if quick:
        pair, sizes = (("tiny", "tiny-teacher"), (4, 8, 8))
    for trainer in gpu_trl.TRAINERS:

        def run(bench: Bench, _: Mapping[str, float], trainer: str = trainer) -> Figures:
            return gpu_trl.measure_trl_step(bench, trainer, pair, sizes, python)

        yield Measurement(f"step trl {trainer}", "step", run)


def _build_loss(name: str, size: Size, chunk: int) -> Measurement:
    return Measurement(name, "loss", lambda b, c: gpu_parts.measure_loss(b, size, chunk))


def _build_update(name: str, student: str, teacher: str, tokens: int) -> Measurement:
    return Measurement(
        name, "update", lambda b, c: gpu_parts.measure_update(b, student, teacher, tokens)
    )


def _build_decoding(name: str, model: str, sizes: tuple[int, int, int], way: str) -> Measurement:
    return Measurement(
        name, "decode", lambda b, c: gpu_parts.measure_decoding(b, model, sizes, way, c)
    )


def _build_scoring(name: str, model: str, texts: int, tokens: int) -> Measurement:
    return Measurement(
        name, "score", lambda b, c: gpu_parts.measure_scoring(b, model, texts, tokens, c)
    )


def _build_step(
    name: str, pair: tuple[str, str], rows: int, prompt: int, new: int, *, lora: bool = False
) -> Measurement:
    return Measurement(
        name,
        "step",
        lambda b, c: gpu_parts.measure_step(b, pair, rows, prompt, new, lora=lora),
    )


def main() -> None:
    """Run the measurements in sequence, and print a line for each."""
    options = _parse_options()
    if not options.quick and not torch.cuda.is_available():
        print(NOTHING)
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    session = open_session("gpu", options)
    bench = Bench(device, options.rounds or (1 if options.quick else 3))
    path = options.folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    record = read_record(path)
    before = record.get("measurements", {})
    figures: dict[str, Figures] = {}
    failed: list[str] = []
    start = time.monotonic()
    print(f"on {name}, torch {torch.__version__}")
    measurements = list(list_quick() if options.quick else list_measurements())
    if peers.find_installed(["trl"], options.peer_python):
        measurements += list_trl(options.peer_python, quick=options.quick)
    for measurement in measurements:
        if options.only and measurement.group not in (*options.only, "ceilings"):
            continue
        if time.monotonic() - start > options.seconds:
            print(f"{measurement.name}: left out, {options.seconds:.0f} seconds are over")
            continue
        line = _measure(measurement, bench, figures.get("ceilings", {}), session)
        figures[measurement.name] = line["figures"]
        failed += [measurement.name] if line["failed"] else []
        _compare(line, before.get(measurement.name))
        if options.record and not options.quick:
            record = {**record, "device": name}
            record["measurements"] = {**record.get("measurements", {}), measurement.name: line}
            write_record(path, record)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _parse_options() -> argparse.Namespace:
    parser = build_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of one file a device")
    groups = sorted({measurement.group for measurement in list_measurements()})
    parser.add_argument("--only", nargs="+", choices=groups, help="only these groups")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="a Python that has TRL (default: this one)"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="start no measurement after this time"
    )
    return parser.parse_args()


def _measure(
    measurement: Measurement, bench: Bench, ceilings: Mapping[str, float], session: Session
) -> dict[str, Any]:
    """Print and return the line of a measurement; the line of a failed one names its error."""
    start, failure = time.monotonic(), None
    figures: Figures = {}
    try:
        figures = measurement.run(bench, ceilings)
    except Exception as error:  # GPU time is scarce: an error in one part must not stop the rest.
        traceback.print_exc(file=sys.stdout)
        failure = str(error).partition("\n")[0] or type(error).__name__
    # The models of this measurement must be gone before the next one makes its own.
    gc.collect()
    if bench.device == "cuda":
        torch.cuda.empty_cache()
    goal_keys = GOALS.get(measurement.name, {})
    return session.report(
        {goal_keys[name]: build_reading(figures[name]) for name in goal_keys if name in figures},
        device=torch.cuda.get_device_name() if bench.device == "cuda" else "cpu",
        measurement=measurement.name,
        figures={name: round_digits(value, 4) for name, value in figures.items()},
        failed=failure,
        wall=round(time.monotonic() - start, 1),
    )


def _compare(line: Mapping[str, Any], before: Mapping[str, Any] | None) -> None:
    """Print the figures next to the figures of the last run on this device."""
    past = {} if before is None else before["figures"]
    rows = [
        [name, value, past.get(name, "-"), value / past[name] if past.get(name) else "-"]
        for name, value in line["figures"].items()
    ]
    if rows:
        print(format_table([line["measurement"], "now", "last time", "now / then"], rows))


def read_record(path: Path) -> dict[str, Any]:
    """Return what this device gave the last time; nothing if it was never measured."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write the device's figures; a run that is cut leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


if __name__ == "__main__":
    main()
