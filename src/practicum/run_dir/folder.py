"""`RunDir`: the paths of a run's files, and the lock that lets one process write them."""

import errno
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from practicum.core.options import spell_options
from practicum.errors import RecipeError, ResourceError
from practicum.run_dir.files import (
    build_resource_error,
    encode_json,
    parse_json,
    remove,
    remove_debris,
)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")
RUN_FILES = (
    "checkpoints",
    "stages",
    "models",
    "scores",
    "tensorboard",
    "pictures",
    "rollouts.jsonl",
    "vocabulary.jsonl",
    "starts.jsonl",
    "alarms.jsonl",
    "timings.jsonl",
    "rejected.jsonl",
    "traffic.jsonl",
    "before.json",
    "after.json",
    "tracking.json",
    "error.json",
    "report.html",
    "summary.json",
    "metrics.jsonl",
    "recipe.json",
    "pipeline.json",
)
"""The files and folders that a run or a pipeline writes, except for the lock."""

REUSED = ("models", "scores")
"""The folders that a run uses again if an earlier attempt failed before its first step."""

_CHECKPOINT = re.compile(r"(.+)@(best|0|[1-9][0-9]{0,17})")
_RESERVED = re.compile(r"(?:CON|PRN|AUX|NUL|COM[0-9]|LPT[0-9])(?:\..*)?", re.IGNORECASE)


class RunDir:
    """The folder of one run; `RunDir.create` makes it and `RunDir.open` finds it.

    `RUN@best` and `RUN@STEP` mean the folder RUN, with one of its checkpoints as `checkpoint`:
    `best`, or the number of a step. Without it, the newest is meant.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.checkpoint = _split_checkpoint(path.absolute())
        self._is_new = False
        self._overwrites = False
        self._is_made_here = False
        self.recipe_json = self.path / "recipe.json"
        """The resolved recipe."""
        self.pipeline_json = self.path / "pipeline.json"
        """The resolved pipeline, if the folder is a pipeline's."""
        self.stages = self.path / "stages"
        """The folder of a pipeline's stages; each stage is a run."""
        self.metrics_jsonl = self.path / "metrics.jsonl"
        """One row per step."""
        self.alarms_jsonl = self.path / "alarms.jsonl"
        """One row per alarm of a monitor."""
        self.rollouts_jsonl = self.path / "rollouts.jsonl"
        """The sampled completions."""
        self.rejected_jsonl = self.path / "rejected.jsonl"
        """The rows of the data that were left out, with reasons."""
        self.traffic_jsonl = self.path / "traffic.jsonl"
        """The turns of users with the student, if it is served."""
        self.summary_json = self.path / "summary.json"
        """The results of the run."""
        self.report_html = self.path / "report.html"
        """The report for people."""
        self.checkpoints = self.path / "checkpoints"
        """The folder of the `step-N` folders."""
        self.models = self.path / "models"
        """The folder of trained models."""
        self.scores = self.path / "scores"
        """The folder in which `cached` teachers store their scores."""

    @classmethod
    def create(cls, root: Path, name: str, *, overwrite: bool = False) -> "RunDir":
        """Make the folder of a new run; RecipeError if it already holds one.

        With `overwrite`, the lock of the new run removes the earlier one.
        """
        run_dir = cls.create_pipeline(root, name, overwrite=overwrite)
        _create_folder(run_dir.path, "checkpoints")
        return run_dir

    @classmethod
    def create_pipeline(cls, root: Path, name: str, *, overwrite: bool = False) -> "RunDir":
        """Make the folder of a new pipeline of runs, as `create` does for a run."""
        _check_name(name)
        run_dir = cls(root / name)
        for path in (root, run_dir.path, run_dir.checkpoints):
            _check_folder(path)
        run_dir._is_made_here = not run_dir.path.exists()
        _create_folder(root, name)
        run_dir._overwrites = overwrite
        run_dir._refuse_existing_run()
        run_dir._is_new = True
        return run_dir

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """Find the folder of an existing run."""
        advice = "name the folder of a run, for example runs/NAME"
        return cls._find(path, "run", file="recipe.json", folder="checkpoints", advice=advice)

    @classmethod
    def open_pipeline(cls, path: Path) -> "RunDir":
        """Find the folder of an existing pipeline."""
        advice = f"leave {spell_options(resume=True)} out to start it"
        return cls._find(path, "pipeline", file="pipeline.json", folder="stages", advice=advice)

    @classmethod
    def _find(cls, path: Path, kind: str, *, file: str, folder: str, advice: str) -> "RunDir":
        """Find a folder that holds `file`; `folder` is its subfolder of steps or stages."""
        run_dir = cls(path)
        _check_folder(run_dir.path)
        _check_folder(run_dir.path / folder)
        if not (run_dir.path / file).is_file():
            missing = f"{file} is missing" if run_dir.path.is_dir() else "there is no such folder"
            raise RecipeError(f"{path} holds no {kind}: {missing}; {advice}")
        return run_dir

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the run, so that only this process writes it.

        Raises ResourceError if another process holds it. A new folder is removed if an error left
        only the lock and from-scratch models in it.
        """
        # The kernel holds the lock (flock) and releases it when the process ends, however it ends.
        # The file stays in the folder of a run: removing a locked file would let a third process
        # lock a new one next to it.
        path = self.path / "run.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise build_resource_error(f"{path} cannot be opened", error) from error
        try:
            self._take_lock(descriptor)
            # Another process may have made a run here between `create` and the lock.
            if self._is_new:
                self._refuse_existing_run()
                if self._has_recipe():
                    self._remove_run(() if self._overwrites else REUSED)
                self._is_new = False
            remove_debris(self.path)
            try:
                yield
            except BaseException:
                self._remove_unused()
                raise
            finally:
                # The kernel releases the lock in any case; the signature is for people.
                with suppress(OSError):
                    os.ftruncate(descriptor, 0)
        finally:
            os.close(descriptor)

    def _take_lock(self, descriptor: int) -> None:
        """Take the lock and sign it; ResourceError names the process that holds it."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResourceError(
                f"{self.path} is in use by {_describe_lock_holder(descriptor)}; "
                f"wait until it ends, or use {spell_options(out='another folder')}"
            ) from None
        # The process that held the lock before may have failed and removed its folder.
        if os.fstat(descriptor).st_nlink == 0:
            raise ResourceError(f"{self.path} was removed by a run that failed; start again")
        signature = {"pid": os.getpid(), "host": socket.gethostname(), "boot_id": _read_boot_id()}
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, encode_json(signature).encode(), 0)
        except OSError as error:
            path = self.path / "run.lock"
            raise build_resource_error(f"{path} cannot be written", error) from error

    def _remove_unused(self) -> None:
        """Remove the folder if this process made it and no run began in it."""
        # A from-scratch model can be made again from its seed; all other files cost money or explain
        # an error.
        has_started = any(
            path.name != "run.lock" and not path.is_dir() and not path.is_relative_to(self.models)
            for path in self.path.rglob("*")
        )
        if self._is_made_here and not has_started:
            # Ignore errors of the removal, so that the error that ended the run is shown.
            shutil.rmtree(self.path, ignore_errors=True)

    def has_started(self) -> bool:
        """Return True if the folder holds a step of a run, or a pipeline."""
        has_rows = self.metrics_jsonl.exists() and self.metrics_jsonl.stat().st_size > 0
        return has_rows or any(self.checkpoints.glob("step-*")) or self.pipeline_json.exists()

    def _refuse_existing_run(self) -> None:
        """Raise RecipeError if a new run would mix its rows and checkpoints with another's."""
        if not self.has_started():
            return
        elsewhere = spell_options(out="another folder")
        if not self._overwrites:
            raise RecipeError(
                f"{self.path} already holds a run; use {spell_options(resume=True)} to continue "
                f"it, {spell_options(overwrite=True)} to replace it, or {elsewhere}"
            )
        if not self._has_recipe():
            raise RecipeError(
                f"{self.path} has neither a run's recipe.json nor a pipeline.json, so it may be no "
                f"run and nothing of it is removed; remove it yourself, or use {elsewhere}"
            )

    def _has_recipe(self) -> bool:
        """Return True if the folder holds the recipe of a run or of a pipeline."""
        keys = {self.recipe_json: "recipe", self.pipeline_json: "stages"}
        for path, key in keys.items():
            with suppress(OSError, ValueError):
                content = parse_json(path.read_bytes())
                if isinstance(content, dict) and key in content:
                    return True
        return False

    def clear(self) -> None:
        """Remove the run in the folder, if any; raises ResourceError if a process writes it."""
        if self._has_recipe():
            with self.lock():
                self._remove_run()

    def _remove_run(self, reused: Sequence[str] = ()) -> None:
        """Remove the files that a run has written, except for `reused`.

        The caller holds the lock, so no process writes the run.
        """
        # The files that mark the folder as a run are removed last: if this process is killed, the
        # next call can finish the removal.
        for name in RUN_FILES:
            path = self.path / name
            if name not in reused and (path.is_symlink() or path.exists()):
                remove(path)
        _create_folder(self.path, self.checkpoints.name)


def _split_checkpoint(path: Path) -> tuple[Path, str | None]:
    """Return a folder and the checkpoint that is named after an `@`, if there is one."""
    named = _CHECKPOINT.fullmatch(path.name)
    if named is None or os.path.isdir(path):
        return path, None
    return path.with_name(named[1]), named[2]


def _create_folder(root: Path, name: str) -> None:
    """Make the folder `root/name`; RecipeError if it leads out of `root`, as a link can."""
    path = root / name
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{path.absolute()} cannot be made"
        if error.errno == errno.ENOENT:
            # Missing parents are also created, so this error means that no folder may be created
            # here.
            raise ResourceError(
                f"{problem}: this place allows no new folder; use {spell_options(out='another folder')}"
            ) from error
        raise build_resource_error(problem, error) from error
    if path.resolve().parent != root.resolve():
        raise RecipeError(f"{path.absolute()} leads out of {root}; give the run another name")


def _check_name(name: str) -> None:
    """Refuse a name that could leave the root, hide, read as an option, or name a device."""
    if _NAME.fullmatch(name) is None or _RESERVED.fullmatch(name) is not None:
        excerpt = ascii(name if len(name) <= 40 else name[:40] + "...")
        raise RecipeError(
            f"run name {excerpt} cannot be a folder's name; "
            "use 1 to 80 of A-Z a-z 0-9 . _ - with no dot or dash first, "
            "and no device name such as CON"
        )


def _check_folder(path: Path) -> None:
    """Refuse a file, or a symbolic link: its target may belong to another user."""
    if path.is_symlink():
        raise RecipeError(f"{path} is a symbolic link; name the folder that it points to")
    if path.exists() and not path.is_dir():
        raise RecipeError(
            f"{path} is a file where a run needs a folder; "
            f"use {spell_options(out='another folder')}"
        )


def _describe_lock_holder(descriptor: int) -> str:
    """Describe the process that holds the lock, by its signature."""
    # The holder signs right after it locks, so an empty file is read again a little later.
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


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"
