"""Count the waits, copies, allocations and graph launches of one sampling call and one update on a GPU.

    python -m benchmarks gpu_profile [--student 0.6B] [--teacher 4B] [--traces FOLDER]
    python -m benchmarks gpu_profile --quick        # tiny models, on a CPU too: whether it works

Each line is an event of the CUDA runtime with its number and its milliseconds, or one of the kernels that take most of the time.
With --traces, a trace of each phase is stored that chrome://tracing and Perfetto read.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_models import SHAPES, build_model
from benchmarks.gpu_parts import Bench, build_data, draw_tokens, run_update
from benchmarks.measuring import format_table
from practicum.backends.local.device_limits import build_limits
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import LocalTrainer
from practicum.backends.local.trial import choose_decoding
from practicum.types import SampleRequest, SamplingParams

EVENTS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpyAsync",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaLaunchKernel",
    "cudaGraphLaunch",
    "cudaStreamBeginCapture",
    "cudaGraphInstantiate",
)
KERNELS = 12
"""The kernels of a phase that are listed."""


def main() -> None:
    """Profile each phase once, after a round that warms up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--student", default="0.6B", choices=list(SHAPES))
    parser.add_argument("--teacher", default="4B", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=64, help="answers that decode together")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per prompt and per answer")
    parser.add_argument("--traces", type=Path, help="where the traces go")
    options = parser.parse_args()
    if options.quick:
        options.student, options.teacher, options.rows, options.tokens = "tiny", "tiny", 4, 8
    bench = Bench("cuda" if torch.cuda.is_available() else "cpu")
    for name, work in build_phases(options, bench):
        report(name, work, bench, options.traces)


def build_phases(
    options: argparse.Namespace, bench: Bench
) -> list[tuple[str, Callable[[], object]]]:
    """Return the phases of a step: sample, score, update."""
    student = build_model(options.student, bench.device, learns=True)
    student = replace(student, decoding=choose_decoding(student, "auto"))
    teacher = LocalSampler(build_model(options.teacher, bench.device))
    limits = replace(build_limits(student.device), sampling_batch=options.rows)
    trainer = LocalTrainer(student, limits)
    prompts = [draw_tokens(options.tokens, row, student.vocab_size) for row in range(options.rows)]
    requests = [SampleRequest(text, row) for row, text in enumerate(prompts)]
    params = SamplingParams(options.tokens)
    samples = trainer.build_sampling_client().sample(requests, params)
    data = build_data(teacher, prompts, samples)
    return [
        ("sample", lambda: trainer.build_sampling_client().sample(requests, params)),
        ("score", lambda: build_data(teacher, prompts, samples)),
        ("update", lambda: run_update(trainer, data)),
    ]


def report(name: str, work: Callable[[], object], bench: Bench, traces: Path | None) -> None:
    """Print the events and the longest kernels of a phase."""
    work()
    bench.synchronize()
    activities = [ProfilerActivity.CPU]
    if bench.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        work()
        bench.synchronize()
    averages = {event.key: event for event in profiler.key_averages()}
    rows = [
        [key, averages[key].count, averages[key].self_cpu_time_total / 1000]
        for key in EVENTS
        if key in averages
    ]
    print(format_table([f"{name}: runtime", "calls", "ms of the host"], rows))
    events = [event for event in averages.values() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    rows = [
        [event.key[:70], event.count, event.self_device_time_total / 1000]
        for event in events[:KERNELS]
    ]
    print(format_table([f"{name}: kernels", "calls", "ms of the device"], rows))
    counts = {key: averages[key].count for key in EVENTS if key in averages}
    print(json.dumps({"benchmark": "gpu_profile", "phase": name, "counts": counts}), flush=True)
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(traces / f"{name}.json"))


if __name__ == "__main__":
    main()
