"""Compare the doctor's verdicts and the monitors' alarms with what happens: healthy setups, and the same setups broken as users do.

    python -m benchmarks verdicts --place FOLDER [--models smollm2] [--only FAULT ...] [--again doctor|monitors]

Each number is a pair of setups: a healthy one, and its twin with one fault. Of both the doctor gives a verdict, and a run gives its
alarms and its gain: the accuracy after minus before, judged by the rows, the template and the length of the healthy setup. The
results have one line for each setup; a second command continues after a stop. With `--again`, the doctor examines the setups again,
or the monitors judge the stored steps again, and nothing is trained. `--record` writes the lines into results/verdicts.jsonl.

`benchmarks.verdict_tables` says which setups count as broken, and which of them were used to choose thresholds.
"""

import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import build_parser
from benchmarks.setups import FAULTS, PAIRS, REAL, Setup, build_pair, build_setup, name_setup
from benchmarks.toys import list_warnings
from benchmarks.verdict_tables import ROWS, read_rows, render_faults, render_verdicts
from practicum import doctor, evaluate
from practicum.errors import PracticumError
from practicum.monitors import MONITORS, Watch
from practicum.recipe import load_recipe, resolve_recipe
from practicum.runs import run
from practicum.runs.exporting import export_run

WARN_ONLY = [f"monitors.{name}={action}" for name, action in list_warnings(list(MONITORS)).items()]
"""No alarm ends a run."""

COUNTS = {"toy": 22 * len(FAULTS), "smollm2": 20}
"""The pairs of each kind of models."""


def main() -> None:
    """Run the setups, and print the tables of the page."""
    parser = build_parser(__doc__)
    parser.add_argument("--place", type=Path, required=True, help="folder of models and runs")
    parser.add_argument("--models", choices=COUNTS, default="toy")
    parser.add_argument("--count", type=int, help="pairs, if fewer")
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--again", choices=("doctor", "monitors"), help="judge the runs of before")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    place = options.place.absolute()
    path = place / "rows.jsonl"
    stored = {row["name"]: row for row in read_rows(path)}
    first = REAL if options.models == "smollm2" else 0
    jobs = [
        (number, fault)
        for number in range(first, first + (options.count or COUNTS[options.models]))
        for fault in ("", list(FAULTS)[number % len(FAULTS)])
        if not fault or fault in options.only
    ]
    jobs = [job for job in jobs if bool(options.again) == (name_setup(*job) in stored)]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        if options.models == "toy" and not options.again:
            list(pool.map(build_pair, [place / "models"] * PAIRS, range(PAIRS)))
        tasks = [pool.submit(play_setup, place, *job, options.again) for job in jobs]
        for task in tasks:
            row = task.result()
            row = stored[row["name"]] = stored.get(row["name"], {}) | row
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            facts = (row[key] for key in ("name", "verdict", "exit_code", "gain", "alarms"))
            print(*facts, flush=True)
    # Where a setup was judged again, its last line counts.
    _write_lines(path, stored)
    # A faulty setup is compared with its twin, which a partial run may not have.
    together = {row["name"]: row for row in read_rows()} | stored
    if options.record:
        _write_lines(ROWS, together)
    rows = list(together.values())
    print(render_verdicts(rows), render_faults(rows), sep="\n\n")


def _write_lines(path: Path, rows: Mapping[str, dict[str, Any]]) -> None:
    lines = [json.dumps(rows[name]) + "\n" for name in sorted(rows)]
    path.write_text("".join(lines), encoding="utf-8")


def play_setup(place: Path, number: int, fault: str, again: str | None) -> dict[str, Any]:
    """Examine a setup, run it and measure its gain; returns its row, or the part that is judged again."""
    torch.set_num_threads(1)
    name = name_setup(number, fault)
    if again == "monitors":
        return {"name": name, "alarms": replay_alarms(place / name, name)}
    setup = build_setup(place, number, fault, keep_runs=bool(again))
    folder = place / name
    row = {"name": name, "models": "smollm2" if number >= REAL else "toy", "number": number}
    row |= {"fault": fault, "dose": setup.dose, "measures": setup.measures}
    row |= examine(setup, folder)
    if not again:
        row |= measure_gain(setup, folder)
    for copied in ("student", "teacher", "student-after"):
        shutil.rmtree(folder / copied, ignore_errors=True)
    return row


def examine(setup: Setup, folder: Path) -> dict[str, Any]:
    """Return the doctor's verdict, its exit code and the outcome of each check."""
    path = _write_recipe(folder / "recipe.yaml", setup.recipe)
    try:
        diagnosis = doctor(path, out=folder / "doctor.json", progress=False)
    except PracticumError as error:
        why = str(error).replace(str(folder), "FOLDER")
        return {"verdict": "refused", "exit_code": error.exit_code, "why": why, "checks": {}}
    checks = {
        result.check.id: [
            result.outcome.status,
            result.outcome.value and asdict(result.outcome.value),
        ]
        for result in diagnosis.results
        if result.outcome.status != "not applicable"
    }
    verdict = diagnosis.verdict
    why = "; ".join(verdict.because)
    return {"verdict": verdict.word, "exit_code": verdict.exit_code, "why": why, "checks": checks}


def measure_gain(setup: Setup, folder: Path) -> dict[str, Any]:
    """Run a setup; returns its alarms, and the student's accuracy before and after as the twin judges it."""
    judge = _write_recipe(folder / "judge.yaml", setup.judge)
    before = evaluate(setup.judge["student"]["model"], recipe=judge, progress=False)["accuracy"]
    row: dict[str, Any] = {"before": before["mean"], "gain": None, "ended": ""}
    try:
        run(load_recipe(folder / "recipe.yaml", WARN_ONLY), out=folder / "runs", progress=False)
        export_run(folder / "runs" / setup.name, folder / "student-after")
        after = evaluate(folder / "student-after", recipe=judge, progress=False)["accuracy"]
        row["gain"] = after["mean"] - before["mean"]
    except PracticumError as error:
        row["ended"] = str(error).replace(str(folder), "FOLDER")
    return row | {"alarms": replay_alarms(folder, setup.name)}


def replay_alarms(folder: Path, name: str) -> dict[str, int] | None:
    """Return the first step of each monitor's alarm in a setup's run; None if it had no step."""
    rows = read_rows(folder / "runs" / name / "metrics.jsonl")
    if not rows:
        return None
    recipe = load_recipe(folder / "recipe.yaml", WARN_ONLY)
    alarms: dict[str, int] = {}
    for alarm in Watch(resolve_recipe(recipe), recipe.monitors).replay(rows):
        if alarm.action != "log":
            alarms.setdefault(alarm.id, alarm.step)
    return alarms


def _write_recipe(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
