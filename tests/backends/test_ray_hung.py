"""A stopped process of Ray, or of a run, ends the command in one line within 30 seconds."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from toy import environment, write_recipe

from .test_ray import on_ray

pytest.importorskip("ray")
from practicum.backends.ray.placement import _find_descendants

pytestmark = [pytest.mark.long, pytest.mark.slow]

STARTED = 400.0
"""The seconds in which a run is at its second step on a machine that others use."""


@pytest.fixture
def command(models: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a run on Ray with more steps than it will take."""
    changes: dict[str, Any] = on_ray(trainers=1) | {"train.steps": 100_000, "evaluation.prompts": 0}
    recipe = write_recipe(models, tmp_path / "toy.yaml", changes)
    words = [sys.executable, "-m", "practicum", "run", str(recipe), "--out", str(tmp_path)]
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        for pid in [*_find_descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raylet/raylet", r"Ray's own process raylet at \S+"),
        ("TrainerRank", r"trainer 0 \(process \d+ on .*\), last seen at .*,"),
    ],
)
def test_what_is_stopped_is_named_and_nothing_is_left(
    command: subprocess.Popen[str], tmp_path: Path, program: str, said: str
) -> None:
    metrics = tmp_path / "toy" / "metrics.jsonl"
    deadline = time.monotonic() + STARTED
    while not (metrics.is_file() and metrics.read_text().count("\n") > 1):
        assert command.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)
    processes = list(_find_descendants(command.pid))
    (stopped,) = [pid for pid in processes if program.encode() in read_words(pid)]
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    assert command.stderr is not None
    seen = {line: time.monotonic() - began for line in iter(command.stderr.readline, "")}
    assert command.wait(60) == 8, "".join(seen)
    assert time.monotonic() - began < 30 + 20
    ((line, seconds),) = [(line, at) for line, at in seen.items() if line.startswith("error: ")]
    assert seconds < 30
    assert re.match(rf"error: after step \d+: {said} has given no sign of life for 20 s", line)
    assert json.loads((tmp_path / "toy" / "error.json").read_text())["exit_code"] == 8
    deadline = time.monotonic() + 20
    while left := [pid for pid in processes if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < deadline, [read_words(pid) for pid in left]
        time.sleep(0.5)


def read_words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
