"""Run the quick start over several seeds: seconds of the whole process, accuracy by domain, and the share of each phase of a step.

python -m benchmarks demo [--seeds 0 1 2]
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import Session, build_parser, spread

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart.yaml"
AS_MAKE_STARTS_IT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_TRIM_THRESHOLD_": "4000000000",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Waiting threads sleep, and memory that one pass frees is reused by the next."""

PHASES = ("sample", "score", "update")
EVALUATIONS = ("before", "after", "teacher")


def main() -> None:
    """Run every seed in a separate process and report once."""
    parser = build_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", help="default 0 1 2, with --quick 0")
    options = parser.parse_args()
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    session = Session("demo", options.quick, options.record, command="python -m benchmarks demo")
    with tempfile.TemporaryDirectory() as folder:
        runs = [_run(Path(folder), seed) for seed in seeds]
    session.report(
        seeds=seeds,
        wall_seconds=spread([run["seconds"] for run in runs]),
        processor_seconds=spread([run["processor"] for run in runs]),
        accuracy={when: [run[when] for run in runs] for when in EVALUATIONS},
        reverse_kl_before=[run["kl"][0] for run in runs],
        reverse_kl_after=[run["kl"][1] for run in runs],
        step_share={phase: spread([run["share"][phase] for run in runs]) for phase in PHASES},
    )


def _run(folder: Path, seed: int) -> dict:
    command = [
        sys.executable,
        "-m",
        "practicum",
        "run",
        str(RECIPE),
        "--out",
        str(folder),
        f"seed={seed}",
        f"name=seed-{seed}",
    ]
    settings = {**os.environ, **AS_MAKE_STARTS_IT}
    start, used = time.monotonic(), _read_processor_seconds()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=settings)
    seconds, processor = time.monotonic() - start, _read_processor_seconds() - used
    run_folder = folder / f"seed-{seed}"
    summary = json.loads((run_folder / "summary.json").read_text())
    print(
        f"seed {seed}: {seconds:.0f} s, {processor:.0f} s of the processor, "
        f"{_read_accuracy(summary['before']['by_domain'])} -> "
        f"{_read_accuracy(summary['after']['by_domain'])}",
        file=sys.stderr,
    )
    return {
        "seconds": seconds,
        "processor": processor,
        **{when: _read_accuracy(summary[when]["by_domain"]) for when in EVALUATIONS},
        "kl": [round(summary[when]["reverse_kl"], 4) for when in ("before", "after")],
        "share": _read_shares(run_folder / "timings.jsonl"),
    }


def _read_processor_seconds() -> float:
    """Return the processor seconds of all processes that this one started and that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def _read_accuracy(by_domain: dict[str, dict[str, float]]) -> dict[str, float]:
    return {domain: round(interval["mean"], 4) for domain, interval in by_domain.items()}


def _read_shares(path: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    sums = {phase: sum(row[f"seconds_{phase}"] for row in rows) for phase in PHASES}
    return {phase: value / sum(sums.values()) for phase, value in sums.items()}


if __name__ == "__main__":
    main()
