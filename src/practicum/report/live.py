"""A run while it goes on: the parts of its page that changed, and whether anybody still writes it."""

import hashlib
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time
from typing import Any, Literal

from practicum.report.markup import seconds
from practicum.report.page import PageParts, navigation, page, parts_of
from practicum.report.reading import RunData, read_run
from practicum.run_dir import is_alive

MOST_ROLLOUTS = 400
"""So many rollouts are read for a live page, so that it is made anew within a second."""

FILES = (
    "recipe.json",
    "before.json",
    "after.json",
    "metrics.jsonl",
    "rollouts.jsonl",
    "timings.jsonl",
    "alarms.jsonl",
    "doctor.json",
    "summary.json",
)
"""The files whose growth is news."""

IDLE, STEPS = 60.0, 10.0
"""Nothing written for a minute, and for ten times the longest step, is said to be long."""

WORK = 4.0
"""A page that took so long to make is used for this many times as long."""


@dataclass(frozen=True, slots=True)
class _RenderedPage:
    """A page as it was made from the files of one moment."""

    signature: tuple[object, ...]
    run: RunData
    parts: PageParts
    digests: Mapping[str, str]
    good_until: float


class Live:
    """The page of a run folder, made anew when its files change; of a pipeline's, that of its last stage that began."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._made: _RenderedPage | None = None

    def page(self) -> str:
        """The whole page as it is now; PracticumError where the folder holds no run."""
        made = self._now()
        return page(made.parts, _version(made.digests))

    def get_changes_since(self, version: str) -> dict[str, Any]:
        """What changed since a version that the reader has, and how the run is."""
        made = self._now()
        known = dict(part.split(":", 1) for part in version.split(",") if ":" in part)
        changed = [id for id, digest in made.digests.items() if known.get(id) != digest]
        text, kind = _status(made.run)
        news = {
            "version": _version(made.digests),
            "status": text,
            "kind": kind,
            "finished": made.run.finished,
        }
        if not changed and len(known) == len(made.digests):
            return news
        return {
            **news,
            "title": made.parts.title,
            "order": list(made.parts.html),
            "html": {id: made.parts.html[id] for id in changed},
            "links": navigation(made.parts),
            "data": made.parts.data,
        }

    def _now(self) -> _RenderedPage:
        with self._lock:
            folder = stage_of(self._folder)
            ended = (folder / "summary.json").is_file()
            signature = (folder, *(_mark(folder / name) for name in FILES))
            made = self._made
            if made is None or (
                made.signature != signature and (monotonic() > made.good_until or ended)
            ):
                start = monotonic()
                run = read_run(folder, MOST_ROLLOUTS)
                parts = parts_of(run)
                good_until = monotonic() + WORK * (monotonic() - start)
                made = self._made = _RenderedPage(
                    signature, run, parts, _digests(parts), good_until
                )
            return made


def stage_of(folder: Path) -> Path:
    """The folder itself, or of a pipeline the last stage that began."""
    begun = sorted(path.parent for path in (folder / "stages").glob("*/recipe.json"))
    return begun[-1] if begun else folder


def _mark(path: Path) -> tuple[int, int] | None:
    """What changes when a file does."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state.st_size, state.st_mtime_ns


def _digests(parts: PageParts) -> dict[str, str]:
    """A few letters for each part; the numbers under the heat map and the curves count with them."""
    under = {"heat": parts.data["heat"], "curves": parts.data["charts"]}
    return {
        id: hashlib.sha256((text + json.dumps(under.get(id))).encode()).hexdigest()[:12]
        for id, text in parts.html.items()
    }


def _version(digests: Mapping[str, str]) -> str:
    return ",".join(f"{id}:{digest}" for id, digest in digests.items())


def _status(run: RunData) -> tuple[str, str]:
    """One line about how the run is, and what kind of news that is."""
    if run.finished:
        return "finished", "done"
    done = int(run.metrics[-1]["step"]) if run.metrics else 0
    where = f"step {done} of {run.steps}" if done else "no step finished yet"
    idle = max(time() - _last_written(run.folder), 0.0)
    if writer(run.folder) == "gone":
        return f"{where}; nobody writes this run any more: go on with --resume", "late"
    if idle > max(IDLE, STEPS * _longest_step(run)):
        return f"{where}; nothing was written for {seconds(idle)}", "late"
    return f"{where}; running", "on"


def _last_written(folder: Path) -> float:
    marks = [_mark(folder / name) for name in FILES]
    return max((mark[1] for mark in marks if mark is not None), default=0) / 1e9


def _longest_step(run: RunData) -> float:
    return max(
        (
            sum(value for name, value in row.items() if name.startswith("seconds_"))
            for row in run.timings
        ),
        default=0.0,
    )


def writer(folder: Path) -> Literal["alive", "gone", "unknown"]:
    """Whether a process still writes the run, by its signature in run.lock; unknown where it ran on another machine.

    The lock itself is not tried: holding it for a moment could turn away a run that is just starting.
    """
    try:
        text = (folder / "run.lock").read_text(encoding="utf-8")
        signature = json.loads(text) if text.strip() else None
    except (OSError, ValueError):
        return "unknown"
    if signature is None:
        return "gone"
    if not isinstance(signature, dict) or signature.get("host") != socket.gethostname():
        return "unknown"
    pid = signature.get("pid")
    return "alive" if isinstance(pid, int) and pid > 0 and is_alive(pid) else "gone"
