"""Tiny models and recipes for whole runs: everything is made from scratch and trains within seconds."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from safetensors.torch import load_file

from practicum.backends.local.scratch import build_scratch_model
from practicum.errors import PracticumError
from practicum.models.config import PretrainConfig, ScratchConfig
from practicum.ports import TaskContext
from practicum.recipe import Recipe, parse_recipe
from practicum.runs import RunResult, run
from practicum.runs.console import Console, SilentConsole
from practicum.tasks.reverse import Config, build
from practicum.training import loop

ALPHABET = "abcd"
TASK = {
    "type": "reverse",
    "alphabet": ALPHABET,
    "shortest": 2,
    "longest": 3,
    "train_size": 48,
    "heldout_size": 8,
}

SEES_HINT = {
    "type": "privileged",
    "teacher": {"type": "self", "weights": "live"},
    "reference": "{hint}",
}
HINTED: dict[str, Any] = {
    "teacher": SEES_HINT,
    "notes": {
        "hint": {"type": "written", "template": "{question}{attempt}", "max_new_tokens": 4},
    },
    "rollout": {"n": 2, "max_new_tokens": 5},
    "train.prompts_per_step": 3,
    "train.checkpoint_every": 1,
}
"""Changes of the toy recipe: a hint in the student's own prompt."""

IN_SEGMENTS: dict[str, Any] = {
    "rollout": {"n": 2, "max_new_tokens": 6, "segment_tokens": 2},
    "train.prompts_per_step": 6,
    "train.checkpoint_every": 1,
    "train.keep_checkpoints": 9,
}
"""Changes of the toy recipe: answers that grow by a part per step."""

FORK_SECONDS = 300
"""A fork that takes longer is ended by SIGALRM."""

JOURNALS = ("metrics.jsonl", "rollouts.jsonl", "alarms.jsonl", "vocabulary.jsonl")
"""The journals that do not depend on the clock."""


def make_model(folder: Path, *, alphabet: str = ALPHABET, **settings: Any) -> Path:
    """Write a from-scratch model folder; `pretrain` is a number of steps on the reversal of strings."""
    steps = settings.pop("pretrain", 0)
    scratch = ScratchConfig(
        **{
            "hidden_size": 32,
            "layers": 1,
            "heads": 2,
            **settings,
            "pretrain": PretrainConfig(steps=steps),
        }
    )
    prompts = build(Config(**TASK), TaskContext(seed=0, base_dir=folder.parent)).train_prompts()
    build_scratch_model(folder, scratch, alphabet, prompts)
    return folder


def toy_data(models: Path, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the data of a recipe that runs in about a second; `changes` are dotted keys, for example `train.steps`."""
    data: dict[str, Any] = {
        "name": "toy",
        "student": {"model": str(models / "student")},
        "teacher": {"type": "model", "model": str(models / "teacher")},
        "task": dict(TASK),
        "rollout": {"n": 1, "max_new_tokens": 5},
        "objective": {"signal": "full", "divergence": "reverse_kl"},
        "optimizer": {"learning_rate": 0.003},
        "train": {"steps": 4, "prompts_per_step": 8, "checkpoint_every": 2, "threads": 1},
        "evaluation": {"prompts": 0},
    }
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place = data
        for parent in parents:
            place = place.setdefault(parent, {})
        # A copy: a later key may write into it, and changes are shared by tests.
        place[last] = deepcopy(value)
    return data


def toy_recipe(models: Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """Return the same data as a validated recipe."""
    return parse_recipe(toy_data(models, changes), "toy")


def toy_run(
    models: Path,
    out: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    allow_changed: Sequence[str] = (),
    console: Console | None = None,
) -> RunResult:
    """Run the toy recipe in this process."""
    return run(
        toy_recipe(models, changes),
        out=out,
        resume=resume,
        allow_changed=allow_changed,
        console=console,
    )


def write_recipe(models: Path, path: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Write the toy recipe as a file; JSON is YAML."""
    path.write_text(json.dumps(toy_data(models, changes)), encoding="utf-8")
    return path


def in_check(names: Iterable[Any], *short: Any, suite: Container[Any] | None = None) -> list[Any]:
    """Return the names as parameters of a test; names that are not among `short` are marked as long.

    With `suite`, names that are in neither are marked as slow.
    """

    def mark(name: Any) -> Any:
        if name in short:
            return ()
        return pytest.mark.long if suite is None or name in suite else pytest.mark.slow

    return [pytest.param(name, marks=mark(name)) for name in names]


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def curve(folder: Path, name: str) -> list[float]:
    """Return one metric over the steps of a run."""
    return [row[name] for row in rows(folder / "metrics.jsonl")]


def assert_same_run(one: Path, other: Path, *, journals: Sequence[str] = JOURNALS) -> None:
    """Assert that two run folders have the same bytes: rows, summary, weights, optimizer and teacher."""
    for name in (*journals, "summary.json", "before.json", "after.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    newest = max(
        (one / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step-"))
    )
    files = sorted(path.name for path in newest.glob("*.safetensors"))
    assert "student.safetensors" in files and "optimizer.safetensors" in files
    for name in files:
        mine, theirs = (
            load_file(newest / name),
            load_file(other / "checkpoints" / newest.name / name),
        )
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert value.equal(theirs[key]), f"{name}: {key}"


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this process's environment on one thread; an empty value removes a variable."""
    merged = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(changes or {})}
    return {name: value for name, value in merged.items() if value}


def forked(
    work: Callable[[], object], env: Mapping[str, str] | None = None, output: Path | None = None
) -> int:
    """Do `work` in a fork of this process and return its exit status as a shell would: 137 where SIGKILL ended it."""
    pid = start_fork(work, env, output)
    return exit_status(os.waitpid(pid, 0)[1])


def start_fork(
    work: Callable[[], object], env: Mapping[str, str] | None = None, output: Path | None = None
) -> int:
    """Begin `work` in a fork, with its two output streams in the file `output`; return the fork's process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    # Threads of this process do not exist in the fork, so code that waits for one would wait for ever.
    signal.alarm(FORK_SECONDS)
    status = 99
    try:
        os.environ.update(env or {})
        descriptor = os.open(output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        work()
        status = 0
    except PracticumError as error:
        print(f"error: {error}", file=sys.stderr)
        status = error.exit_code
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # a fork must never continue as the test session
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def exit_status(wait_status: int) -> int:
    """Return 128 + the signal, or the exit code."""
    code = os.waitstatus_to_exitcode(wait_status)
    return 128 - code if code < 0 else code


def command(*words: str) -> Callable[[], None]:
    """Return work for a fork: the command line `practicum WORDS`."""

    def work() -> None:
        from practicum.cli import main

        sys.argv = ["practicum", *words]
        main()

    return work


def said(tmp_path: Path, *words: str) -> tuple[int, str]:
    """Return the exit code and everything printed by a command in a fork."""
    output = tmp_path / "output"
    status = forked(command(*words), output=output)
    return status, output.read_text(encoding="utf-8")


def wait_in_first_step() -> AbstractContextManager[object]:
    """Let the first step say that it goes on and then wait for a signal, however fast the machine is."""

    def wait(*_: object, **__: object) -> None:
        os.write(1, b"within the step\n")
        while True:
            time.sleep(0.01)

    return patch.object(loop, "generate_rollouts", wait)


def interrupt_twice(pid: int, output: Path) -> int:
    """Interrupt a fork within its step, and again once it has noted the first; return its exit status."""
    when(output.is_file)
    when(lambda: "within the step" in output.read_text())
    os.kill(pid, signal.SIGINT)
    # Two signals before the first is noted count as one.
    when(lambda: "interrupt again" in output.read_text())
    os.kill(pid, signal.SIGINT)
    return exit_status(os.waitpid(pid, 0)[1])


def when(ready: Callable[[], bool]) -> None:
    """Wait until a condition holds; the timeout of a minute is far longer than needed."""
    for _ in range(6000):
        if ready():
            return
        time.sleep(0.01)
    raise AssertionError("it never happened")


def lines(path: Path) -> int:
    """Return the number of finished lines of a file that may not exist yet."""
    return path.read_bytes().count(b"\n") if path.is_file() else 0


class RecordingConsole(SilentConsole):
    """A console that remembers the events and the summary."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.end: dict[str, object] = {}

    def event(self, text: str) -> None:
        self.events.append(text)

    def finish(self, summary: Mapping[str, object]) -> None:
        self.end = dict(summary)
