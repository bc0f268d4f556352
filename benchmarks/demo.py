"""The quick start over several seeds: wall seconds of the whole process, gain, and the share of each phase of a step.

python -m benchmarks.demo [--seeds 0 1 2]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.measuring import report, spread
from practicum.evaluation import bootstrap

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "quickstart.yaml"
PHASES = ("sample", "score", "update")


def main() -> None:
    """Run every seed in a process of its own and report once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    seeds = parser.parse_args().seeds
    with tempfile.TemporaryDirectory() as folder:
        runs = [_run(Path(folder), seed) for seed in seeds]
    gains = torch.tensor([gain for run in runs for gain in run["gains"]], dtype=torch.float64)
    pooled = bootstrap(gains, seed=0)
    report(
        "demo",
        seeds=seeds,
        wall_seconds=spread([run["seconds"] for run in runs]),
        accuracy_before=[run["before"] for run in runs],
        accuracy_after=[run["after"] for run in runs],
        accuracy_teacher=[run["teacher"] for run in runs],
        gain={"mean": round(pooled.mean, 4), "low": round(pooled.low, 4), "high": round(pooled.high, 4)},
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
    start = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    home = folder / f"seed-{seed}"
    summary = json.loads((home / "summary.json").read_text())
    print(
        f"seed {seed}: {seconds:.0f} s, {summary['before']['accuracy']} -> {summary['after']['accuracy']}",
        file=sys.stderr,
    )
    return {
        "seconds": seconds,
        "before": round(summary["before"]["accuracy"]["mean"], 4),
        "after": round(summary["after"]["accuracy"]["mean"], 4),
        "teacher": round(summary["teacher"]["accuracy"]["mean"], 4),
        "kl": [round(summary[when]["reverse_kl"], 4) for when in ("before", "after")],
        "gains": [sample["reward_after"] - sample["reward_before"] for sample in summary["samples"]],
        "share": _share(home / "timings.jsonl"),
    }


def _share(path: Path) -> dict[str, float]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    sums = {phase: sum(row[f"seconds_{phase}"] for row in rows) for phase in PHASES}
    return {phase: value / sum(sums.values()) for phase, value in sums.items()}


if __name__ == "__main__":
    main()
