"""The runs of a comparison: every arm with every seed, a few at a time, each in its own process.

    DIR/ARM/seed-0.json    the recipe
    DIR/ARM/seed-0/        the run folder
    DIR/ARM/seed-0.log     its output

On Linux the processes are copies of one that has imported everything (`practicum.runs.warm`).
A finished run is not repeated, a stopped one resumes from its newest checkpoint, and a
failure does not affect further runs.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from practicum.core.faults import inject_fault
from practicum.core.options import spell_options
from practicum.core.ram import read_free_memory
from practicum.core.stopping import Stop
from practicum.core.waits import Wait, show_wait
from practicum.errors import Interrupted, RecipeError
from practicum.recipe import resolve_recipe
from practicum.run_dir import (
    RunDir,
    list_changed_fields,
    read_json,
    shapes,
    shorten_path,
    write_json,
)
from practicum.runs.console import Console
from practicum.runs.warm import IS_AVAILABLE, WarmRun, WarmStarter
from practicum.studies.compare.arms import Design
from practicum.text import make_printable

POLL_SECONDS = 0.05

COUNT_SECONDS = 2.0
"""The time between two counts of the finished steps, which reads journals."""

FREE_MEMORY_FACTOR = 1.2
"""A run starts if the free memory is at least this factor times the largest run's memory."""


@dataclass(frozen=True, slots=True, eq=False)
class RunJob:
    """One run of a comparison; `data` is the resolved recipe or pipeline, `home` the comparison's
    folder.

    `data` has no hash, so jobs compare by identity.
    """

    arm: str
    seed: int
    resolved_recipe: Mapping[str, Any]
    parent_dir: Path

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.parent_dir / self.arm / f"seed-{self.seed}"

    @property
    def recipe_path(self) -> Path:
        """The recipe of the run."""
        return self.folder.with_suffix(".json")

    @property
    def log_path(self) -> Path:
        """The output of the run."""
        return self.folder.with_suffix(".log")

    @property
    def is_finished(self) -> bool:
        """True if the run wrote its summary and its report, which comes last."""
        return (self.folder / "report.html").is_file() and (self.folder / "summary.json").is_file()

    @property
    def steps_done(self) -> int:
        """The number of steps in the journals, over all stages of a pipeline."""
        journals = [*self.folder.glob("metrics.jsonl"), *self.folder.glob("stages/*/metrics.jsonl")]
        return sum(path.read_bytes().count(b"\n") for path in journals)

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}"


def plan_jobs(design: Design, folder: Path, resume: bool) -> list[RunJob]:
    """Return every run, seed by seed; RecipeError if the folder does not fit the design.

    A folder fits if it is new, or with `resume` if it holds a comparison of the same recipes.
    """
    # Seed by seed, so that an early look at the folder compares all arms.
    jobs = [
        RunJob(arm.name, seed, resolve_recipe(design.recipes[arm.name][seed]), folder)
        for seed in design.seeds
        for arm in design.arms
    ]
    has_runs = any(folder.glob("*/seed-*.json"))
    if has_runs and not resume:
        raise RecipeError(
            f"{folder} already holds a comparison; use {spell_options(resume=True)} "
            f"to continue it, {spell_options(overwrite=True)} to replace it, "
            f"or {spell_options(out='another folder')}"
        )
    if resume and not has_runs:
        raise RecipeError(
            f"{folder} holds no comparison to resume; "
            f"leave {spell_options(resume=True)} out to start it"
        )
    for job in jobs:
        if not job.recipe_path.is_file():
            continue
        stored = read_json(job.recipe_path, shapes.RESOLVED)
        differences = list_changed_fields(stored, job.resolved_recipe)
        if differences:
            problem = f"{shorten_path(job.recipe_path)}: arm {job.arm!r} changed"
            advice = f"undo this, name a new arm, or use {spell_options(out='another folder')}:"
            raise RecipeError([f"{problem}; {advice}", *differences])
    return jobs


def clear_comparison(folder: Path) -> None:
    """Remove the runs of an earlier comparison and its results; other files in the folder are kept.

    Raises ResourceError if a process writes the comparison or one of its runs.
    """
    if not any(folder.glob("*/seed-*.json")):
        return
    with RunDir(folder).lock():
        for recipe_path in folder.glob("*/seed-*.json"):
            run_dir = RunDir(recipe_path.with_suffix(""))
            if run_dir.path.is_dir():
                run_dir.clear()
            recipe_path.with_suffix(".log").unlink(missing_ok=True)
            # Removed last, because this file tells the next call that files are left to remove.
            recipe_path.unlink()
        for name in ("compare.json", "compare.html"):
            (folder / name).unlink(missing_ok=True)


def run_jobs(
    jobs: Sequence[RunJob],
    at_once: int,
    console: Console,
    stop: Stop,
    starter: WarmStarter | None,
) -> dict[RunJob, str]:
    """Run the unfinished jobs, at most `at_once` at a time; returns the failed runs with their
    reasons.

    Raises Interrupted after a signal, once every process has saved its state.
    """
    pool = _JobPool([job for job in jobs if not job.is_finished], starter)
    num_skipped = len(jobs) - len(pool.waiting)
    if num_skipped:
        console.event(f"{num_skipped} of {len(jobs)} runs are finished already")
    console.begin(len(jobs), num_skipped + 1)
    with show_wait("steps of all runs") as wait:
        return _follow_runs(pool, jobs, at_once, console, stop, wait)


def _follow_runs(
    pool: "_JobPool",
    jobs: Sequence[RunJob],
    at_once: int,
    console: Console,
    stop: Stop,
    wait: Wait,
) -> dict[RunJob, str]:
    """Start all runs, wait until every run has ended, and return the failed ones."""
    counted = time.monotonic()
    try:
        while pool.waiting or pool.running:
            if time.monotonic() - counted > COUNT_SECONDS:
                counted = time.monotonic()
                wait.move_to(sum(job.steps_done for job in jobs))
            number = stop()
            if number is not None:
                pool.stop()
                num_open = sum(not job.is_finished for job in jobs)
                raise Interrupted(
                    number,
                    f"stopped by {signal.Signals(number).name} with {num_open} of {len(jobs)} runs "
                    f"to do; resume with {spell_options(resume=True)}",
                )
            pool.start_waiting(at_once)
            time.sleep(POLL_SECONDS)
            for job, reason in pool.collect_ended():
                console.event(f"{job}: {reason or _describe_result(job)}")
                console.step(len(jobs) - len(pool.waiting) - len(pool.running), {}, None)
                inject_fault("compare.run_ended")
    finally:
        # After an error, no run may continue in the background. The newest checkpoints remain, so
        # that the runs can be resumed.
        pool.kill()
    return pool.failed


def _describe_result(job: RunJob) -> str:
    """Return the steps and the accuracy of a finished run, in a few words."""
    summary = read_json(job.folder / "summary.json", shapes.ENDED)
    after = (summary["stages"][-1] if "stages" in summary else summary)["after"]
    text = f"{job.steps_done} steps"
    if after is not None and after["accuracy"] is not None:
        text += f", accuracy {after['accuracy']['mean']:.3f}"
    return text


class _JobPool:
    """Waiting runs, running processes, and the reasons of failed runs."""

    def __init__(self, waiting: list[RunJob], starter: WarmStarter | None) -> None:
        self.waiting = waiting
        self.running: dict[RunJob, subprocess.Popen[bytes] | WarmRun] = {}
        self._starter = starter
        self.failed: dict[RunJob, str] = {}
        self._peak = 0
        self._measured = False

    def start_waiting(self, at_once: int) -> None:
        """Start runs while memory allows, at most `at_once` at a time."""
        while self.waiting and len(self.running) < at_once and (not self.running or self._fits()):
            job = self.waiting.pop(0)
            self.running[job] = start_run(job, self._starter)

    def collect_ended(self) -> Iterator[tuple[RunJob, str | None]]:
        """Yield the runs that ended since the last call, with the reason if a run failed."""
        for job, process in list(self.running.items()):
            self._peak = max(self._peak, _measure_memory(process.pid))
            code = process.poll()
            # A process at its start is small: its memory use is meaningful from its first step on.
            self._measured = self._measured or code is not None or job.steps_done > 0
            if code is None:
                continue
            del self.running[job]
            reason = None if code == 0 and job.is_finished else _find_reason(job, code)
            if reason is not None:
                self.failed[job] = reason
            yield job, reason

    def stop(self) -> None:
        """Ask every run to save and end, and wait for it."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait()

    def kill(self) -> None:
        """Kill every process that still runs."""
        for process in self.running.values():
            process.kill()
            process.wait()
        self.running = {}

    def _fits(self) -> bool:
        """Return True if another run fits in memory."""
        # Only the first run is started until one step has shown how much memory a run takes. Every
        # later run may grow to the largest size seen, so the missing part counts as taken.
        sizes = [_measure_memory(process.pid) for process in self.running.values()]
        growth = sum(max(self._peak - size, 0) for size in sizes)
        return self._measured and read_free_memory() - growth >= FREE_MEMORY_FACTOR * self._peak


def _measure_memory(pid: int) -> int:
    """Return the resident bytes of a process; 0 if it ended."""
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def start_run(job: RunJob, starter: WarmStarter | None) -> subprocess.Popen[bytes] | WarmRun:
    """Start or resume a run in its own process, which ends when this process dies.

    Without a starter the process is a new Python.
    """
    job.recipe_path.parent.mkdir(parents=True, exist_ok=True)
    write_json(job.recipe_path, dict(job.resolved_recipe))
    words = ["run", str(job.recipe_path), "--out", str(job.recipe_path.parent), "--json"]
    if any((job.folder / name).is_file() for name in ("recipe.json", "pipeline.json")):
        words.append("--resume")
    if starter is not None:
        return starter.start(words, job.log_path)
    # -P: a file of the current folder must not replace a package. A separate session: Ctrl-C in
    # the terminal only reaches this process, which then stops the runs in order.
    with job.log_path.open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "practicum", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_set_threads(),
            start_new_session=True,
        )


@contextmanager
def open_starter() -> Iterator[WarmStarter | None]:
    """Start the process that starts runs, where the system allows it; end it after the block."""
    if not IS_AVAILABLE:
        yield None
        return
    starter = WarmStarter(_set_threads())
    starter.open()
    try:
        yield starter
    finally:
        starter.close()


def _set_threads() -> dict[str, str]:
    """Return this process's environment with one thread for each run."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, **threads}


def _find_reason(job: RunJob, code: int) -> str:
    """Return why a run failed, in one line: its own error, or the signal that ended it."""
    if code < 0:
        text = f"failed: killed by {signal.Signals(-code).name}"
        # The kernel's out-of-memory killer sends SIGKILL and leaves no message.
        if code == -signal.SIGKILL:
            text += f"; there may have been no memory for it, so use {spell_options(jobs=1)}"
        return text
    lines = job.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        error = " ".join(line.strip() for line in lines[errors[-1] :])
        return f"failed: {make_printable(error).removeprefix('error: ')}"
    texts = [line.strip() for line in lines if line.strip() and not _is_json(line)]
    last = texts[-1] if texts else "no reason given"
    return f"failed: exit code {code}: {make_printable(last)}"


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
