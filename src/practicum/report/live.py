"""Serve the page of a run that is still going: its changes, and the state of its process."""

import hashlib
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, time
from typing import Any, Literal

from practicum.report.markup import format_duration
from practicum.report.page import PageParts, build_page_parts, render_navigation, render_page
from practicum.report.run_data import RunData, read_run
from practicum.run_dir import is_alive
from practicum.run_dir.files import parse_json

MAX_ROLLOUTS = 400
"""The number of rollouts that a live page reads, so that it renders within a second."""

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
"""The files that make a page outdated when they grow."""

MIN_IDLE_SECONDS, MIN_IDLE_STEPS = 60.0, 10.0
"""A run is late if it writes nothing for a minute and for ten times its longest step."""

REUSE_FACTOR = 4.0
"""A page is reused for this factor times the seconds that it took to render."""


@dataclass(frozen=True, slots=True)
class _RenderedPage:
    """A page and the state of the files that it was rendered from."""

    signature: tuple[object, ...]
    run: RunData
    parts: PageParts
    digests: Mapping[str, str]
    good_until: float


class LivePage:
    """The page of a run's folder, or of the stage of a pipeline that began last.

    It is rendered again when a file changes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._page: _RenderedPage | None = None

    def render(self) -> str:
        """Return the whole current page; PracticumError if the folder holds no run."""
        page = self._refresh()
        return render_page(page.parts, _join_version(page.digests))

    def get_changes_since(self, version: str) -> dict[str, Any]:
        """Return the sections that changed since the reader's version, and the run's status."""
        page = self._refresh()
        digests = dict(part.split(":", 1) for part in version.split(",") if ":" in part)
        changed = [id for id, digest in page.digests.items() if digests.get(id) != digest]
        text, kind = _describe_status(page.run)
        news = {
            "version": _join_version(page.digests),
            "status": text,
            "kind": kind,
            "finished": page.run.is_finished,
        }
        # A section that disappeared changes no digest: only the number of sections shows it.
        if not changed and len(digests) == len(page.digests):
            return news
        return {
            **news,
            "title": page.parts.title,
            "order": list(page.parts.html),
            "html": {id: page.parts.html[id] for id in changed},
            "links": render_navigation(page.parts),
            "data": page.parts.data,
        }

    def _refresh(self) -> _RenderedPage:
        """Render the page if its files changed and the last rendering is too old."""
        # Requests that arrive while a page is rendered wait for it: rendering twice gains nothing.
        with self._lock:
            folder = find_current_stage(self._folder)
            has_ended = (folder / "summary.json").is_file()
            # The files are looked at before they are read: what is written in between looks like a
            # change at the next call, and is never missed.
            signature = (folder, *(_read_stamp(folder / name) for name in FILES))
            page = self._page
            if page is None or (
                page.signature != signature and (monotonic() > page.good_until or has_ended)
            ):
                start = monotonic()
                run = read_run(folder, MAX_ROLLOUTS)
                parts = build_page_parts(run)
                good_until = monotonic() + REUSE_FACTOR * (monotonic() - start)
                page = _RenderedPage(signature, run, parts, _digest_sections(parts), good_until)
                self._page = page
            return page


def find_current_stage(folder: Path) -> Path:
    """Return the folder itself, or for a pipeline the stage that began last."""
    stages = sorted(path.parent for path in (folder / "stages").glob("*/recipe.json"))
    return stages[-1] if stages else folder


def _read_stamp(path: Path) -> tuple[int, int] | None:
    """Return size and modification time of a file, or None if it is absent."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return state.st_size, state.st_mtime_ns


def _digest_sections(parts: PageParts) -> dict[str, str]:
    """Return a short digest of each section and of the numbers behind it."""
    # The script draws from these numbers, so a section changes with them even if its HTML does not.
    data = {"heat": parts.data["heat"], "curves": parts.data["charts"]}
    return {
        id: hashlib.sha256((text + json.dumps(data.get(id))).encode()).hexdigest()[:12]
        for id, text in parts.html.items()
    }


def _join_version(digests: Mapping[str, str]) -> str:
    return ",".join(f"{id}:{digest}" for id, digest in digests.items())


def _describe_status(run: RunData) -> tuple[str, str]:
    """Return one line about the state of the run, and the kind of this state."""
    if run.is_finished:
        assert run.summary is not None, "a finished run has a summary"
        return f"finished: {run.summary['verdict']['verdict']}", "done"
    step = f"step {run.last_step} of {run.num_steps}" if run.last_step else "no step finished yet"
    stamps = [_read_stamp(run.folder / name) for name in FILES]
    last_written = max((stamp[1] for stamp in stamps if stamp is not None), default=0) / 1e9
    idle = max(time() - last_written, 0.0)
    if find_writer_state(run.folder) == "gone":
        return f"{step}; no process writes this run any more: resume with --resume", "late"
    if idle > max(MIN_IDLE_SECONDS, MIN_IDLE_STEPS * _find_longest_step(run)):
        return f"{step}; nothing was written for {format_duration(idle)}", "late"
    return f"{step}; running", "on"


def _find_longest_step(run: RunData) -> float:
    """Return the seconds of the longest step so far."""
    durations = (
        sum(value for name, value in row.items() if name.startswith("seconds_"))
        for row in run.timings
    )
    return max(durations, default=0.0)


def find_writer_state(folder: Path) -> Literal["alive", "gone", "unknown"]:
    """Find out from the signature in run.lock whether a process still writes the run.

    The answer is unknown for a process of another machine.
    """
    # The lock itself is not tried: holding it for a moment could turn away a run that just starts.
    try:
        text = (folder / "run.lock").read_text(encoding="utf-8")
        signature = parse_json(text.encode()) if text.strip() else None
    except (OSError, ValueError):
        return "unknown"
    if signature is None:
        return "gone"
    if not isinstance(signature, dict) or signature.get("host") != socket.gethostname():
        return "unknown"
    pid = signature.get("pid")
    return "alive" if isinstance(pid, int) and pid > 0 and is_alive(pid) else "gone"
