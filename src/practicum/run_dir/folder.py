"""`RunDir`: where the files of one run are, and the lock that lets one process write them."""

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from practicum.errors import RecipeError, ResourceError
from practicum.run_dir.files import encode_json, parse_json, remove_debris, resource_error

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")
_RESERVED = re.compile(r"(?:CON|PRN|AUX|NUL|COM[0-9]|LPT[0-9])(?:\..*)?", re.IGNORECASE)


class RunDir:
    """The folder of one run, made by `RunDir.create` or found by `RunDir.open`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._new = False
        self.recipe_json = self.path / "recipe.json"
        """The resolved recipe."""
        self.pipeline_json = self.path / "pipeline.json"
        """The resolved pipeline, where the folder is a pipeline's."""
        self.stages = self.path / "stages"
        """The folder of a pipeline's stages, each of which is a run."""
        self.metrics_jsonl = self.path / "metrics.jsonl"
        """One row a step."""
        self.alarms_jsonl = self.path / "alarms.jsonl"
        """What the monitors found, one row an alarm."""
        self.rollouts_jsonl = self.path / "rollouts.jsonl"
        """What the student wrote."""
        self.rejected_jsonl = self.path / "rejected.jsonl"
        """What was not trained on, and why."""
        self.summary_json = self.path / "summary.json"
        """What the run came to."""
        self.report_html = self.path / "report.html"
        """The report for people."""
        self.checkpoints = self.path / "checkpoints"
        """The folder of `step-N` folders."""
        self.models = self.path / "models"
        """Where trained models are written."""
        self.scores = self.path / "scores"
        """Where `cached` teachers keep their answers."""

    @classmethod
    def create(cls, root: Path, name: str) -> "RunDir":
        """Make the folder of a new run; one that already holds a run is refused."""
        run_dir = cls.create_pipeline(root, name)
        _make_folder(run_dir.path, "checkpoints")
        return run_dir

    @classmethod
    def create_pipeline(cls, root: Path, name: str) -> "RunDir":
        """Make the folder of a new pipeline, whose stages are runs inside it; one that holds anything is refused."""
        _check_name(name)
        run_dir = cls(root / name)
        for path in (root, run_dir.path, run_dir.checkpoints):
            _check_folder(path)
        _make_folder(root, name)
        run_dir._refuse_existing_run()
        run_dir._new = True
        return run_dir

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """Find the folder of an existing run."""
        advice = "name the folder of a run, for example runs/NAME"
        return cls._find(path, "run", file="recipe.json", folder="checkpoints", advice=advice)

    @classmethod
    def open_pipeline(cls, path: Path) -> "RunDir":
        """Find the folder of an existing pipeline."""
        advice = "leave --resume out to start it"
        return cls._find(path, "pipeline", file="pipeline.json", folder="stages", advice=advice)

    @classmethod
    def _find(cls, path: Path, kind: str, *, file: str, folder: str, advice: str) -> "RunDir":
        """Find a folder that holds `file`, and beside it the folder of its steps or stages where there is one."""
        run_dir = cls(path)
        for place in (run_dir.path, run_dir.path / folder):
            _check_folder(place)
        if not (run_dir.path / file).is_file():
            missing = f"{file} is missing" if run_dir.path.is_dir() else "there is no such folder"
            raise RecipeError(f"{path} holds no {kind}: {missing}; {advice}")
        return run_dir

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only process that writes this run.

        The kernel holds the lock (flock on `run.lock`) and lets go of it when the process ends, however it ends. The
        file stays: removing a locked file would let a third process lock a new one beside it.
        """
        path = self.path / "run.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise resource_error(f"{path} cannot be opened", error) from error
        try:
            self._acquire(descriptor)
            if self._new:
                self._refuse_existing_run()
                self._new = False
            remove_debris(self.path)
            try:
                yield
            finally:
                os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def _acquire(self, descriptor: int) -> None:
        """Take the lock and sign it, or say who holds it."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResourceError(
                f"{self.path} is in use by {_describe_lock_holder(descriptor)}; wait until it ends, or write --out another folder"
            ) from None
        signature = {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": _boot_id()}
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, encode_json(signature).encode(), 0)
        except OSError as error:
            raise resource_error(f"{self.path / 'run.lock'} cannot be written", error) from error

    def _refuse_existing_run(self) -> None:
        """A new run must not mix its rows and checkpoints with those of an old one."""
        rows = self.metrics_jsonl.exists() and self.metrics_jsonl.stat().st_size > 0
        if rows or any(self.checkpoints.glob("step-*")) or self.pipeline_json.exists():
            raise RecipeError(
                f"{self.path} already holds a run; write --resume to continue it or --out another folder"
            )


def _make_folder(root: Path, name: str) -> None:
    """Make `root/name`; one that leads somewhere else is refused."""
    path = root / name
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise resource_error(f"{path.absolute()} cannot be made", error) from error
    if path.resolve().parent != root.resolve():
        raise RecipeError(f"{path.absolute()} leads out of {root}; give the run another name")


def _check_name(name: str) -> None:
    """Refuse a name that could leave the root, hide, read as an option, or mean a device on another system."""
    if _NAME.fullmatch(name) is None or _RESERVED.fullmatch(name) is not None:
        shown = ascii(name if len(name) <= 40 else name[:40] + "...")
        raise RecipeError(
            f"run name {shown} cannot be a folder's name; use 1 to 80 of A-Z a-z 0-9 . _ - with no dot or dash first, "
            "and no device name such as CON"
        )


def _check_folder(path: Path) -> None:
    """Refuse a link, whose target is not ours to write, or a file."""
    if path.is_symlink():
        raise RecipeError(f"{path} is a symbolic link; name the folder that it points to")
    if path.exists() and not path.is_dir():
        raise RecipeError(
            f"{path} is a file where a run needs a folder; write --out another folder"
        )


def _describe_lock_holder(descriptor: int) -> str:
    """Who holds the lock. The holder signs right after it locks, so an empty file is read again a little later."""
    for _ in range(20):
        text = os.pread(descriptor, 4096, 0)
        if text:
            try:
                signature = parse_json(text)
                return f"process {signature['pid']} on {signature['host']}"
            except (ValueError, TypeError, KeyError):
                break
        time.sleep(0.01)
    return "another process"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
