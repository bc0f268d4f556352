"""Run every paper's recipe unchanged: the change on held-out prompts, one JSON line per recipe in results/papers.jsonl.

python -m benchmarks papers [NAME ...] [--seeds 0 1 2] [--jobs 2] [--only all|recipes|controls]
python -m benchmarks papers --carry REVISION

A recipe that joins a reward and a teacher also has a control, the same recipe with the teacher off, with a separate line. If
several recipes have the same control, the line names one of them. A line is stored until its recipe is run again. The methods
page only shows lines of the current recipe.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measuring import describe_machine
from practicum.errors import PracticumError
from practicum.models.config import ScratchConfig
from practicum.recipe import (
    SWITCH,
    WORDS,
    Recipe,
    build_control,
    list_recipe_names,
    load_recipe,
    resolve_recipe,
)

ROOT = Path(__file__).resolve().parents[1]
LINES = ROOT / "results" / "papers.jsonl"


def main() -> None:
    """Run the recipes that are named, or all, and put their lines in their places."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="such as gkd; none: every paper's recipe")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", choices=["all", "recipes", "controls"], default="all")
    parser.add_argument(
        "--carry",
        metavar="REVISION",
        help="run nothing: keep the lines that were of their recipes in a git revision, after a setting was renamed or added",
    )
    options = parser.parse_args()
    if options.carry:
        print(f"{carry_lines(options.carry)} lines have a new fingerprint")
        return
    names = [name for name in list_recipe_names() if name.startswith("papers/")]
    if options.names:
        names = [name for name in names if name.removeprefix("papers/") in options.names]
    runs: list[tuple[str, bool]] = [(name, False) for name in names if options.only != "controls"]
    if options.only != "recipes":
        runs += [(name, True) for name in find_different_controls(names)]
    failures = []
    with ThreadPoolExecutor(options.jobs) as pool:
        tasks = [pool.submit(measure_recipe, name, off, options.seeds) for name, off in runs]
        for number, task in enumerate(tasks, start=1):
            try:
                line = task.result()
            except PracticumError as error:
                print(f"{number} of {len(runs)}: {error}", file=sys.stderr, flush=True)
                failures.append(runs[number - 1][0])
                continue
            keep(line)
            print(f"{number} of {len(runs)}: {json.dumps(line)}", flush=True)
    if failures:
        raise SystemExit(f"failed: {', '.join(failures)}")


LIMITS = {
    "evaluation": ("every",),
    "rollout": ("episodes",),
    "task": ("sandbox",),
    "train": ("threads", "budget", "save_in_background"),
}
"""Settings by section that limit time and otherwise only change rounding; no recipe of a paper has a budget."""

ABOUT_IT = ("prices", "monitors", "tracking")
"""Sections that only use a run's numbers; no recipe of a paper lets a monitor change anything."""


def _list_mappings(settings: Any) -> Iterator[dict[str, Any]]:
    """Yield all mappings of settings, the outer ones first."""
    if isinstance(settings, dict):
        yield settings
        settings = list(settings.values())
    if isinstance(settings, list):
        for entry in settings:
            yield from _list_mappings(entry)


def fingerprint(recipe: Recipe) -> str:
    """Return the fingerprint of a line's recipe, without its description and settings that only limit memory and time."""
    settings = {
        key: setting
        for key, setting in resolve_recipe(recipe).items()
        if key not in ("name", *WORDS, *ABOUT_IT)
    }
    # Of the local backend only batch sizes in memory, which only change rounding.
    if settings["backend"]["type"] == "local":
        del settings["backend"]
    for section, name in (
        ("train", "curriculum"),
        ("evaluation", "search"),
        ("student", "drafter"),
        ("rollout", "draft"),
    ):
        # These keys are newer than most lines.
        if settings[section][name] is None:
            del settings[section][name]
    if not settings["student"]["train_encoder"]:
        del settings["student"]["train_encoder"]
    for mapping in list(_list_mappings(settings)):
        if mapping.get("type") == "shapes" and mapping["asks"] == "any":
            del mapping["asks"], mapping["heldout_shows"], mapping["most"]
        if "lora" in mapping and mapping["quantization"] is None:
            del mapping["quantization"]
        if mapping.get("dtype") == "auto":
            # What it is on a CPU, where lines are measured.
            mapping["dtype"] = "float32"
        if "rank" in mapping and mapping.get("targets") is None and not mapping.get("rslora"):
            mapping.pop("targets", None)
            mapping.pop("rslora", None)
        if mapping.get("type") == "privileged" and mapping["images"] is None:
            del mapping["images"]
        if "pretrain" in mapping:
            if mapping["positions"] == ScratchConfig().positions:
                del mapping["positions"]
            if mapping["pretrain"]["question"] is None:
                del mapping["pretrain"]["question"]
    for section, names in LIMITS.items():
        for name in names:
            # Only some tasks run programs.
            settings[section].pop(name, None)
    return hashlib.sha256(
        json.dumps({**settings, "base_dir": ""}, sort_keys=True).encode()
    ).hexdigest()[:12]


def carry_lines(revision: str) -> int:
    """Update the fingerprints of lines that matched their recipe in a git revision; return the number of lines.

    Use it after a setting was renamed or added, if `python -m benchmarks digests` shows that no run has changed.
    """
    lines = list(read_lines().values())
    before, after = _fingerprint_lines(lines, revision), _fingerprint_lines(lines)
    carried = 0
    for line, old, new in zip(lines, before, after, strict=True):
        if line["of"] == old and old != new:
            keep({**line, "of": new})
            carried += 1
    return carried


def _fingerprint_lines(lines: Sequence[dict[str, Any]], revision: str = "") -> list[str]:
    """Return the fingerprint of each line's recipe, by the code and recipes of a revision; none: the current ones."""
    request = json.dumps([(line["recipe"], "teacher" in line) for line in lines])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "then" if revision else ROOT
        if revision:
            _run_git("worktree", "add", "--detach", str(root), revision)
        try:
            answer = subprocess.run(
                [sys.executable, "-c", FINGERPRINTS, request],
                cwd=root,
                env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
                check=True,
                capture_output=True,
                text=True,
            )
        finally:
            if revision:
                _run_git("worktree", "remove", "--force", str(root))
    return json.loads(answer.stdout)


FINGERPRINTS = """
import json, sys
from benchmarks.papers import SWITCH, fingerprint
from practicum.recipe import load_recipe
asked = json.loads(sys.argv[1])
print(json.dumps([fingerprint(load_recipe(name, [SWITCH] if off else [])) for name, off in asked]))
"""
"""Prints the fingerprints of recipes as JSON."""


def _run_git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True)


def find_different_controls(names: Sequence[str]) -> list[str]:
    """Return the recipes that have a control, one recipe per distinct control."""
    by_fingerprint: dict[str, str] = {}
    for name in names:
        control = build_control(load_recipe(name))
        if control is not None:
            by_fingerprint.setdefault(fingerprint(control), name)
    return list(by_fingerprint.values())


def measure_recipe(name: str, off: bool, seeds: Sequence[int]) -> dict[str, Any]:
    """Run a recipe, or its control with the teacher off, with each seed in a separate process with one thread."""
    summaries = [_run_seed(name, off, seed) for seed in seeds]
    return {
        "recipe": name,
        **({"teacher": "off"} if off else {}),
        "of": fingerprint(load_recipe(name, [SWITCH] if off else [])),
        "seeds": list(seeds),
        "accuracy_before": _average(
            [summary["before"]["accuracy"]["mean"] for summary in summaries]
        ),
        "accuracy_after": _average([summary["after"]["accuracy"]["mean"] for summary in summaries]),
        "gains": [
            [round(summary["gain"][end], 3) for end in ("low", "mean", "high")]
            for summary in summaries
        ],
        **_read_drafts(summaries),
        "accuracy_teacher": _average([_read_teacher(summary) for summary in summaries]),
        "reverse_kl_before": _average(
            [summary["before"].get("reverse_kl") for summary in summaries]
        ),
        "reverse_kl_after": _average([summary["after"].get("reverse_kl") for summary in summaries]),
        "seconds": _average([summary["seconds"] for summary in summaries]),
        "machine": describe_machine(),
    }


def _run_seed(name: str, off: bool, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"seed={seed}", "train.threads=1", *([SWITCH] if off else [])]
        command = [sys.executable, "-m", "practicum", "run", name, *changes, "--out", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False
        )
        if ended.returncode:
            raise PracticumError(
                f"{' '.join([name, *changes])}: exit {ended.returncode}: {ended.stderr.strip()[-400:]}"
            )
        (run,) = Path(folder).iterdir()
        timings = [
            json.loads(line)
            for line in (run / "timings.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        seconds = sum(
            value for row in timings for key, value in row.items() if key.startswith("seconds")
        )
        return {
            **json.loads((run / "summary.json").read_text(encoding="utf-8")),
            "seconds": seconds,
        }


def _read_drafts(summaries: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return a drafter's tokens per call of its target, before and after training; else nothing."""
    readings = {
        f"tokens_per_call_{when}": _average(
            [summary[when].get("drafts/tokens_per_call") for summary in summaries]
        )
        for when in ("before", "after")
    }
    return {} if None in readings.values() else readings


def _read_teacher(summary: dict[str, Any]) -> float | None:
    teacher = summary["teacher"]
    return None if teacher is None else teacher["accuracy"]["mean"]


def _average(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return round(sum(numbers) / len(numbers), 3) if numbers else None


def keep(line: dict[str, Any]) -> None:
    """Insert a line in the order of names, with lines of controls at the end."""
    lines_by_key = {**read_lines(), _build_key(line): line}
    LINES.write_text(
        "".join(json.dumps(lines_by_key[key]) + "\n" for key in sorted(lines_by_key)),
        encoding="utf-8",
    )


def read_lines() -> dict[tuple[bool, str], dict[str, Any]]:
    """Return the stored lines, each by whether it is of a control and by its recipe's name."""
    texts = LINES.read_text(encoding="utf-8").splitlines() if LINES.is_file() else []
    return {_build_key(line): line for line in map(json.loads, texts)}


def _build_key(line: dict[str, Any]) -> tuple[bool, str]:
    return "teacher" in line, line["recipe"]


if __name__ == "__main__":
    main()
