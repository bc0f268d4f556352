"""Commands on a read-only disk: one line and exit code 8, and commands that only read work."""

import contextlib
import ctypes
import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from toy import forked, write_recipe

from practicum.cli import main

NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
READ_ONLY, REMOUNT, BIND = 1, 32, 4096
NO_MOUNT = 77
"""The exit code of a fork on a system that allows no mounts."""


def make_read_only(folder: Path) -> None:
    """Mount a folder over itself in this process only, so that root cannot write there either."""
    system = ctypes.CDLL(None, use_errno=True)
    user, group, path = os.getuid(), os.getgid(), os.fsencode(folder)
    try:
        if system.unshare(NEW_USER | NEW_MOUNTS):
            raise OSError(ctypes.get_errno(), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        for flags in (BIND, REMOUNT | BIND | READ_ONLY):
            if system.mount(path, path, None, flags, None):
                raise OSError(ctypes.get_errno(), "mount")
    except OSError as error:
        print(error, flush=True)
        os._exit(NO_MOUNT)


def call(*words: object) -> tuple[int, str]:
    """Return the exit code of a command, and its lines on standard error."""
    sys.argv = ["practicum", *map(str, words)]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    return 0, said.getvalue()


@pytest.mark.long
def test_a_read_only_disk_is_one_line(finished: Path, models: Path, tmp_path: Path) -> None:
    disk, elsewhere = tmp_path / "disk", tmp_path / "elsewhere"
    shutil.copytree(finished, disk / "toy")
    elsewhere.mkdir()
    recipe = write_recipe(models, tmp_path / "toy.yaml", {"evaluation.prompts": 2})
    arms = (recipe, f"b={recipe},optimizer.learning_rate=0.001")
    calls = {
        "report": ("report", disk / "toy"),
        "export": ("export", disk / "toy", disk / "model"),
        "compare": ("compare", *arms, "--out", disk / "compare"),
        "doctor": ("doctor", recipe, "--out", disk / "toy" / "diagnosis.json"),
        # Its file is written below the current folder.
        "doctor here": ("doctor", recipe),
        "answers": ("answers", recipe, "--out", disk / "answers.jsonl"),
        "run": ("run", recipe, "name=other", "--out", disk),
        "resume": ("run", recipe, "--resume", "--out", disk),
        "overwrite": ("run", recipe, "--overwrite", "--out", disk),
        "export elsewhere": ("export", disk / "toy", elsewhere / "model"),
    }

    def work() -> None:
        make_read_only(disk)
        os.chdir(disk)
        ended = {name: call(*words) for name, words in calls.items()}
        (elsewhere / "ended.json").write_text(json.dumps(ended))

    code = forked(work, output=tmp_path / "output")
    said = (tmp_path / "output").read_text()
    if code == NO_MOUNT:
        pytest.skip(f"this system mounts nothing read-only: {said.strip()}")
    assert code == 0, said
    ended = json.loads((elsewhere / "ended.json").read_text())
    assert ended.pop("export elsewhere")[0] == 0 and (elsewhere / "model").is_dir()
    for name, (status, lines) in ended.items():
        assert status == 8 and lines.startswith("error: "), (name, status, lines)
        assert lines.count("\n") == 1 and "Read-only file system; make it" in lines, (name, lines)
