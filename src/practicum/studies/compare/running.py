"""Runs every arm with every seed, a few at a time, each as an ordinary run in a process of its own.

    DIR/ARM/seed-0.json    the recipe
    DIR/ARM/seed-0/        the run folder
    DIR/ARM/seed-0.log     what it printed

A run that is finished is not run again, one that was stopped goes on from its newest checkpoint, and one that fails leaves
the others alone.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from practicum.core.faults import fault
from practicum.core.stopping import Stop
from practicum.errors import Interrupted, RecipeError
from practicum.recipe import resolved
from practicum.run_dir import changed_fields, near, read_json, shapes, write_json
from practicum.runs.console import Console
from practicum.studies.compare.arms import Design
from practicum.text import make_printable

PAUSE = 0.2
"""Seconds between two looks at the runs."""

SPARE = 1.2
"""A run begins where so many times the largest run's memory is free."""

DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux: what a process is told when its parent dies."""

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True, eq=False)
class RunJob:
    """One run of the comparison, of a recipe or a pipeline as resolved data; data has no hash, so a job is itself alone."""

    arm: str
    seed: int
    data: Mapping[str, Any]
    home: Path

    @property
    def folder(self) -> Path:
        """Its run folder."""
        return self.home / self.arm / f"seed-{self.seed}"

    @property
    def file(self) -> Path:
        """Its recipe."""
        return self.folder.with_suffix(".json")

    @property
    def log(self) -> Path:
        """What it printed."""
        return self.folder.with_suffix(".log")

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return (self.folder / "report.html").is_file() and (self.folder / "summary.json").is_file()

    @property
    def steps_done(self) -> int:
        """Steps that are written down."""
        journals = [*self.folder.glob("metrics.jsonl"), *self.folder.glob("stages/*/metrics.jsonl")]
        return sum(path.read_bytes().count(b"\n") for path in journals)

    def __str__(self) -> str:
        return f"{self.arm}, seed {self.seed}"


def plan_jobs(found: Design, home: Path, resume: bool) -> list[RunJob]:
    """Every run, seed by seed so that an early look compares all arms; RecipeError where the folder does not fit."""
    jobs = [
        RunJob(arm.name, seed, resolved(found.recipes[arm.name][seed]), home)
        for seed in found.seeds
        for arm in found.arms
    ]
    begun = sorted(home.glob("*/seed-*.json")) if home.is_dir() else []
    if begun and not resume:
        raise RecipeError(
            f"{home} already holds a comparison; write --resume to go on with it, or --out another folder"
        )
    if resume and not begun:
        raise RecipeError(
            f"{home} holds no comparison to go on with; leave --resume out to start it"
        )
    for job in jobs:
        if job.file.is_file():
            differences = changed_fields(read_json(job.file, shapes.RESOLVED), job.data)
            if differences:
                raise RecipeError(
                    [
                        f"{near(job.file)}: arm {job.arm!r} changed; undo this, or name a new arm or --out:",
                        *differences,
                    ]
                )
    return jobs


def run_all(
    jobs: Sequence[RunJob], at_once: int, console: Console, stop: Stop
) -> dict[RunJob, str]:
    """Run what is not finished, at most `at_once` at a time; the reason, in one line, of each run that failed.

    Raises Interrupted after every process has saved its state.
    """
    pool = _JobPool([job for job in jobs if not job.finished])
    skipped = len(jobs) - len(pool.waiting)
    if skipped:
        console.event(f"{skipped} of {len(jobs)} runs are finished already")
    console.begin(len(jobs), skipped + 1)
    try:
        while pool.waiting or pool.running:
            number = stop()
            if number is not None:
                pool.stop()
                left = sum(not job.finished for job in jobs)
                name = signal.Signals(number).name
                raise Interrupted(
                    number,
                    f"stopped by {name} with {left} of {len(jobs)} runs to do; go on with --resume",
                )
            pool.begin(at_once)
            time.sleep(PAUSE)
            for job, reason in pool.ended():
                place = len(jobs) - len(pool.waiting) - len(pool.running)
                console.event(f"{job}: {reason or _reached(job)}")
                console.step(place, {}, None)
                fault("compare.run_ended")
    finally:
        pool.kill()
    return pool.failed


def _reached(job: RunJob) -> str:
    """The result of a finished run in a few words."""
    summary = read_json(job.folder / "summary.json", shapes.ENDED)
    after = (summary["stages"][-1] if "stages" in summary else summary)["after"]
    accuracy = None if after is None else after["accuracy"]
    return f"{job.steps_done} steps" + (
        "" if accuracy is None else f", accuracy {accuracy['mean']:.3f}"
    )


class _JobPool:
    """Runs that wait, runs that go on, and why runs failed."""

    def __init__(self, waiting: list[RunJob]) -> None:
        self.waiting = waiting
        self.running: dict[RunJob, subprocess.Popen[bytes]] = {}
        self.failed: dict[RunJob, str] = {}
        self._peak = 0
        self._measured = False

    def begin(self, at_once: int) -> None:
        """Begin what there is room for: the first alone, until a step has shown how much memory a run needs."""
        while self.waiting and len(self.running) < at_once and (not self.running or self._fits()):
            job = self.waiting.pop(0)
            self.running[job] = start(job)

    def ended(self) -> Iterator[tuple[RunJob, str | None]]:
        """The runs that ended since the last look, with the reason of each that failed."""
        for job, process in list(self.running.items()):
            self._measure(process.pid)
            code = process.poll()
            self._measured = self._measured or code is not None or job.steps_done > 0
            if code is None:
                continue
            del self.running[job]
            reason = None if code == 0 and job.finished else _reason(job, code)
            if reason is not None:
                self.failed[job] = reason
            yield job, reason

    def stop(self) -> None:
        """Ask every run to save and end, and wait until it has."""
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait()

    def kill(self) -> None:
        """Let nothing go on behind our back; the newest checkpoints stay."""
        for process in self.running.values():
            process.kill()
            process.wait()
        self.running = {}

    def _fits(self) -> bool:
        """Whether another run fits, when those that go on have grown to the largest that was seen."""
        sizes = [_resident(process.pid) for process in self.running.values()]
        growth = sum(max(self._peak - size, 0) for size in sizes)
        return self._measured and free_memory() - growth >= SPARE * self._peak

    def _measure(self, pid: int) -> None:
        self._peak = max(self._peak, _resident(pid))


def free_memory() -> int:
    """Bytes that can still be had: of the machine, or of the container where that has less."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # "max" where there is no limit, no file outside of Linux
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return free


def _resident(pid: int) -> int:
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def start(job: RunJob) -> subprocess.Popen[bytes]:
    """Begin a run or go on with it. A terminal's Ctrl-C does not reach it, and it stops when this process dies."""
    job.file.parent.mkdir(parents=True, exist_ok=True)
    write_json(job.file, dict(job.data))
    resume = (
        ["--resume"]
        if any((job.folder / name).is_file() for name in ("recipe.json", "pipeline.json"))
        else []
    )
    # -P: a file of the current folder must not stand in for a package.
    words = [
        sys.executable,
        "-P",
        "-m",
        "practicum",
        "run",
        str(job.file),
        "--out",
        str(job.file.parent),
        "--json",
        *resume,
    ]
    with job.log.open("wb") as log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
            preexec_fn=None if _LIBC is None else _die_with_parent,
        )


def _die_with_parent() -> None:
    assert _LIBC is not None
    _LIBC.prctl(DEATH_SIGNAL, signal.SIGTERM)


def _environment() -> Mapping[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, **threads}


def _reason(job: RunJob, code: int) -> str:
    """Why a run failed, in one line: its own error, or the signal that ended it."""
    if code < 0:
        hint = (
            "; there may have been no memory for it, so write --jobs 1"
            if code == -signal.SIGKILL
            else ""
        )
        return f"failed: killed by {signal.Signals(-code).name}{hint}"
    lines = job.log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [place for place, line in enumerate(lines) if line.startswith("error: ")]
    if errors:
        return (
            f"failed: {make_printable(' '.join(line.strip() for line in lines[errors[-1] :]))[7:]}"
        )
    last = next(
        (line for line in reversed(lines) if line.strip() and not _is_json(line)), "no reason given"
    )
    return f"failed: exit code {code}: {make_printable(last.strip())}"


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
