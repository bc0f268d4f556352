import errno
import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from torch import Tensor
from toy import toy_recipe

from practicum.backends import local
from practicum.core.faults import inject_fault
from practicum.core.options import spell_for_shell
from practicum.errors import CheckpointError, RecipeError, ResourceError
from practicum.recipe import Recipe, resolve_recipe
from practicum.run_dir import (
    Journal,
    RunDir,
    check_space,
    collect_versions,
    compare_versions,
    find_checkpoint,
    list_changed_fields,
    list_changed_parts,
    propose_flags,
    read_json,
    read_rows,
    save_checkpoint,
    shapes,
    split_changes,
    to_json_number,
    truncate_journal,
    write_json,
)
from practicum.run_dir.changes import MAY_CHANGE, MUST_STAY
from practicum.run_dir.differences import find_changes, find_recipe_differences
from practicum.run_dir.files import remove
from practicum.run_dir.folder import RUN_FILES

# A process that imports once, then forks to run each snippet of code and answers with the wait status.
NURSERY = """
import json, os, sys, traceback
import torch
import practicum.run_dir
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.environ.update(order["environment"])
            exec(order["code"], {"__name__": "snippet", "arguments": order["arguments"]})
            status = 0
        except SystemExit as error:
            status = error.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    print(os.waitpid(pid, 0)[1], flush=True)
"""
Child = Callable[..., int]


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    """Run code in a fresh process; return its exit code, or minus the signal that killed it."""
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        assert nursery.stdout.readline() == "ready\n"

        def run(code: str, *arguments: object, **environment: str) -> int:
            assert nursery.stdin is not None
            assert nursery.stdout is not None
            order = {
                "code": textwrap.dedent(code),
                "arguments": list(map(str, arguments)),
                "environment": environment,
            }
            nursery.stdin.write(json.dumps(order) + "\n")
            nursery.stdin.flush()
            return os.waitstatus_to_exitcode(int(nursery.stdout.readline()))

        yield run
        nursery.stdin.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir.create(tmp_path / "runs", "toy")
    write_json(made.recipe_json, {"name": "toy"})
    return made


def weights(step: int, size: int = 64) -> dict[str, dict[str, Tensor]]:
    return {
        "student": {"layer.weight": torch.arange(size, dtype=torch.float32) + step},
        "optimizer": {
            "exp_avg": torch.full((size,), 0.5 * step),
            "step": torch.tensor(float(step)),
        },
    }


def save(run_dir: RunDir, *steps: int, keep: int = 2) -> Path:
    return [
        save_checkpoint(run_dir, step, weights(step), {"rng": [step, 7]}, keep=keep)
        for step in steps
    ][-1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------------------------------------- names and folders


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../../x",
            "/tmp/x",
            "a/b",
            "a\\b",
            "a\0b",
            "",
            ".",
            "..",
            ".hidden",
            "-rf",
            "x" * 81,
            "x" * 300,
        ),
        *("CON", "nul.txt", "com1", "name\n", "na me", "p\u0430ypal", "\u202ename", "~", "*"),
    ],
)
def test_a_name_that_is_no_plain_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    root = tmp_path / "runs"
    with pytest.raises(
        RecipeError, match=r"run name .* cannot be a folder's name; use 1 to 80 of"
    ) as caught:
        RunDir.create(root, name)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isascii()
    assert not root.exists()


@pytest.mark.parametrize("name", ["a", "x" * 80, "Run-1.2_final", "CONSOLE", "_private", "1"])
def test_a_plain_name_is_a_folder_inside_the_root(tmp_path: Path, name: str) -> None:
    assert RunDir.create(tmp_path, name).path == tmp_path / name


def test_links_in_place_of_a_runs_folders_are_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "root").symlink_to(outside)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "toy").symlink_to(outside)
    (tmp_path / "runs" / "deep").mkdir()
    (tmp_path / "runs" / "deep" / "checkpoints").symlink_to(outside)
    for root, name in [("root", "toy"), ("runs", "toy"), ("runs", "deep")]:
        with pytest.raises(
            RecipeError, match="is a symbolic link; name the folder that it points to"
        ):
            RunDir.create(tmp_path / root, name)
    for path in ("runs/toy", "runs/deep"):
        with pytest.raises(RecipeError, match="is a symbolic link"):
            RunDir.open(tmp_path / path)
    assert names(outside) == []


def test_a_folder_with_a_run_is_not_used_again(run_dir: RunDir) -> None:
    root, message = (
        run_dir.path.parent,
        r"toy already holds a run; use resume=True to continue it, overwrite=True to replace it, or out=",
    )
    assert RunDir.create(root, "toy").path == run_dir.path
    run_dir.metrics_jsonl.write_text('{"step": 1}\n')
    with pytest.raises(RecipeError, match=message):
        RunDir.create(root, "toy")
    run_dir.metrics_jsonl.unlink()
    save(run_dir, 1)
    with pytest.raises(RecipeError, match=message):
        RunDir.create(root, "toy")


def test_open_says_what_is_missing(tmp_path: Path, run_dir: RunDir) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(
        RecipeError, match=r"empty holds no run: recipe\.json is missing; name the folder of a run"
    ):
        RunDir.open(tmp_path / "empty")
    with pytest.raises(RecipeError, match="absent holds no run: there is no such folder"):
        RunDir.open(tmp_path / "absent")
    with pytest.raises(RecipeError, match="file is a file where a run needs a folder"):
        RunDir.open(tmp_path / "file")
    opened = RunDir.open(run_dir.path)
    assert opened.checkpoints == run_dir.path / "checkpoints"
    files = [opened.recipe_json, opened.metrics_jsonl, opened.rollouts_jsonl, opened.rejected_jsonl]
    files += [opened.summary_json, opened.report_html, opened.models]
    assert {path.parent for path in files} == {run_dir.path}


def test_b5_a_folder_that_cannot_be_written_is_named_before_any_training() -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o555)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(
                ResourceError, match=r"toy cannot be made: Permission denied; make it writable,"
            ) as caught:
                RunDir.create(root, "toy")
        finally:
            os.seteuid(user)
        assert caught.value.exit_code == 8
        root.chmod(0o755)


def test_b5_a_run_deleted_under_way_is_named_at_the_next_save(run_dir: RunDir) -> None:
    shutil.rmtree(run_dir.path)
    with pytest.raises(
        ResourceError,
        match=r"checkpoint of step 3 cannot be saved in .*toy/checkpoints: No such file",
    ):
        save(run_dir, 3)
    assert not run_dir.path.exists()
    with (
        pytest.raises(ResourceError, match=r"run\.lock cannot be opened: No such file"),
        run_dir.lock(),
    ):
        pass


# ------------------------------------------------------------------------------------------------------------ lock


def test_a_second_holder_is_told_who_the_first_is(run_dir: RunDir) -> None:
    with run_dir.lock():
        with (
            pytest.raises(
                ResourceError, match=f"is in use by process {os.getpid()} on .*; wait until it ends"
            ) as caught,
            RunDir.open(run_dir.path).lock(),
        ):
            pass
        assert caught.value.exit_code == 8
    with RunDir.open(run_dir.path).lock():
        pass


def test_a_run_that_began_and_ended_between_create_and_lock_is_not_written_over(
    tmp_path: Path,
) -> None:
    first, second = RunDir.create(tmp_path, "same"), RunDir.create(tmp_path, "same")
    with first.lock():
        first.metrics_jsonl.write_text('{"step": 1}\n')
    with pytest.raises(RecipeError, match="same already holds a run"), second.lock():
        pass
    with first.lock():
        pass


def test_kill_9_lets_go_of_the_lock_and_the_next_holder_cleans_up(
    run_dir: RunDir, child: Child
) -> None:
    code = """
        import os, signal
        from pathlib import Path
        from practicum.run_dir import RunDir
        run_dir = RunDir.open(Path(arguments[0]))
        with run_dir.lock():
            run_dir.path.joinpath(f"recipe.json.tmp-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert child(code, run_dir.path) == -signal.SIGKILL
    assert any(".tmp-" in name for name in names(run_dir.path))
    with run_dir.lock():
        assert names(run_dir.path) == ["checkpoints", "recipe.json", "run.lock"]


def test_b8_of_two_runs_started_at_once_exactly_one_proceeds(tmp_path: Path, child: Child) -> None:
    code = """
        import os, sys, time
        from pathlib import Path
        from practicum.errors import PracticumError
        from practicum.run_dir import RunDir

        def start(delay, hold):
            time.sleep(delay)
            try:
                run_dir = RunDir.create(Path(arguments[0]), "same")
                with run_dir.lock():
                    run_dir.metrics_jsonl.write_text("{}\\n")
                    time.sleep(hold)
            except PracticumError as error:
                return error.exit_code
            return 0

        pids = []
        for delay in (0, float(arguments[1])):
            pid = os.fork()
            if pid == 0:
                os._exit(start(delay, float(arguments[2])))
            pids.append(pid)
        codes = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
        sys.exit(0 if codes[0] == 0 and codes[1] in (2, 8) else 1)
    """
    # The last events: the first run is over before the second has the lock, or even before it starts.
    for trial, (delay, hold) in enumerate(
        [(0, 0.2), (0.001, 0.2), (0.1, 0.2), (0, 0), (0.002, 0), (0.01, 0)]
    ):
        assert child(code, tmp_path / str(trial), delay, hold) == 0, (delay, hold)


# ----------------------------------------------------------------------------------------------- files and journals


def test_write_json_replaces_the_file_whole_and_refuses_nan(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"kl": 0.5})
    with pytest.raises(AssertionError, match="json_number"):
        write_json(path, {"kl": float("nan")})
    assert read_json(path) == {"kl": 0.5}
    assert names(tmp_path) == ["summary.json"]
    with pytest.raises(
        ResourceError, match=r"absent/summary\.json cannot be written: No such file"
    ):
        write_json(tmp_path / "absent" / "summary.json", {})
    path.write_text('{"kl": NaN}')
    with pytest.raises(
        CheckpointError, match=r"summary\.json is not JSON \(NaN is not a number that"
    ):
        read_json(path)
    path.write_text("[" * 100_000)
    with pytest.raises(
        CheckpointError, match=r"summary\.json is not JSON \(nested deeper than 100\)"
    ):
        read_json(path)


def test_json_number_turns_what_is_not_finite_into_null() -> None:
    assert [to_json_number(value) for value in (1.5, math.nan, math.inf, -math.inf)] == [
        1.5,
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "kl"', b"{", b"\x00" * 40, b"\x00" * 40 + b"\n", b'"text"\n', b"\xff\n"]
)
def test_a_torn_last_line_is_cut_when_the_journal_is_opened_again(
    tmp_path: Path, torn: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1}\n{"step": 2}\n'
    path.write_bytes(whole + torn)
    if b"\n" not in torn:
        assert [row["step"] for row in read_rows(path)] == [1, 2]
    journal = Journal(path, essential=True)
    assert path.read_bytes() == whole
    journal.append({"step": 3, "text": "\u4f60\u202e\ud83d"})
    journal.close()
    journal.close()
    assert path.read_bytes() == whole + b'{"step": 3, "text": "\\u4f60\\u202e\\ud83d"}\n'


def test_a_resumed_journal_equals_an_uninterrupted_one_byte_for_byte(tmp_path: Path) -> None:
    def train(path: Path, steps: range) -> None:
        journal = Journal(path, essential=True)
        for step in steps:
            for sample in range(3):
                journal.append({"step": step, "sample": sample, "kl": 1 / (step + sample)})
        journal.close()

    train(tmp_path / "whole.jsonl", range(1, 21))
    train(tmp_path / "resumed.jsonl", range(1, 14))
    with (tmp_path / "resumed.jsonl").open("ab") as file:
        file.write(b'{"step": 14, "sam')
    size = len(b"".join((tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)[:30]))
    truncate_journal(tmp_path / "resumed.jsonl", size)
    train(tmp_path / "resumed.jsonl", range(11, 21))
    assert (tmp_path / "resumed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_journals_refuse_nan_and_damaged_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(path, essential=True)
    with pytest.raises(AssertionError, match="json_number"):
        journal.append({"kl": math.inf})
    journal.close()
    path.write_bytes(b'{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(
        CheckpointError, match=r"metrics\.jsonl line 2 is not a JSON object; remove the line"
    ):
        list(read_rows(path))
    with pytest.raises(ResourceError, match=r"rows\.jsonl cannot be opened: No such file"):
        Journal(tmp_path / "absent" / "rows.jsonl", essential=False)


def test_b4_a_full_disk_costs_log_rows_and_nothing_else(tmp_path: Path, child: Child) -> None:
    code = """
        import resource
        from pathlib import Path
        from practicum.errors import ResourceError
        from practicum.run_dir import Journal
        log = Journal(Path(arguments[0], "rollouts.jsonl"), essential=False)
        metrics = Journal(Path(arguments[0], "metrics.jsonl"), essential=True)
        for journal in (log, metrics):
            journal.append({"step": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        log.append({"step": 2, "text": "x" * 200})
        log.append({"step": 3})
        log.append({"step": 4, "text": "x" * 200})
        assert log.dropped == 2
        try:
            metrics.append({"step": 2, "text": "x" * 200})
        except ResourceError as error:
            assert "metrics.jsonl cannot take another row: File too large; raise the file size limit" in str(error)
        else:
            raise SystemExit(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.append({"step": 5})
    """
    assert child(code, tmp_path) == 0
    assert [row["step"] for row in read_rows(tmp_path / "rollouts.jsonl")] == [1, 3, 5]
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1]


# ----------------------------------------------------------------------------------------------------- checkpoints


def test_what_is_saved_is_what_is_found(run_dir: RunDir) -> None:
    assert find_checkpoint(run_dir) == (None, [])
    tied = torch.randn(8, 4)
    tensors = {
        "student": {
            "embed": tied,
            "head": tied,
            "transposed": tied.T,
            "row": tied[3],
            "half": tied.bfloat16(),
        },
        "teacher": {
            "empty": torch.empty(0),
            "scalar": torch.tensor(3),
            "flag": torch.tensor([True]),
        },
        "nothing": {},
    }
    path = save_checkpoint(run_dir, 10, tensors, {"rng": [1, 2], "text": "\ud83d"})
    checkpoint, warnings = find_checkpoint(run_dir)
    assert warnings == []
    assert checkpoint is not None
    assert (checkpoint.path, checkpoint.step) == (path, 10)
    assert checkpoint.state == {"rng": [1, 2], "text": "\ud83d", "step": 10}
    assert checkpoint.versions == collect_versions()
    for stem, named in tensors.items():
        loaded = checkpoint.read_tensors(stem)
        assert loaded.keys() == named.keys()
        assert all(
            torch.equal(loaded[name], named[name]) and loaded[name].dtype == named[name].dtype
            for name in named
        )
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors cannot be loaded"):
        checkpoint.read_tensors("optimizer")


def test_a_state_with_nan_is_refused_before_anything_is_written(run_dir: RunDir) -> None:
    with pytest.raises(AssertionError, match="json_number"):
        save_checkpoint(run_dir, 1, weights(1), {"best": math.inf})
    assert names(run_dir.checkpoints) == []


def test_file_modes_follow_the_umask(run_dir: RunDir) -> None:
    before = os.umask(0o027)
    try:
        path = save(run_dir, 1)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}


def test_the_newest_are_kept_and_later_steps_of_an_abandoned_history_go(run_dir: RunDir) -> None:
    save(run_dir, 10, 20, 30)
    assert names(run_dir.checkpoints) == ["step-20", "step-30"]
    save(run_dir, 25)
    assert names(run_dir.checkpoints) == ["step-20", "step-25"]
    save(run_dir, 100, keep=1)
    assert names(run_dir.checkpoints) == ["step-100"]


def test_retention_follows_no_link(run_dir: RunDir, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    save(run_dir, 1)
    (run_dir.checkpoints / "step-2").symlink_to(outside)
    (run_dir.checkpoints / "step-3.tmp-1").symlink_to(outside)
    (run_dir.checkpoints / f"trash-step-3-{os.getpid()}").symlink_to(outside)
    (run_dir.checkpoints / "step-1" / "link").symlink_to(outside)
    save(run_dir, 4, 5, 6, keep=1)
    assert names(outside) == ["precious"]
    assert [name for name in names(run_dir.checkpoints) if not name.startswith("step-3.tmp-1")] == [
        "step-2",
        "step-6",
    ]
    save(run_dir, 2)
    assert names(outside) == ["precious"]
    assert not (run_dir.checkpoints / "step-2").is_symlink()


def test_a_step_saved_again_is_replaced(run_dir: RunDir) -> None:
    save(run_dir, 1, 2)
    save_checkpoint(run_dir, 2, weights(99), {"again": True})
    checkpoint, _ = find_checkpoint(run_dir)
    assert checkpoint is not None
    assert checkpoint.state == {"again": True, "step": 2}
    assert checkpoint.read_tensors("student")["layer.weight"][0] == 99
    assert names(run_dir.checkpoints) == ["step-1", "step-2"]


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        (
            cut_in_half,
            "student.safetensors",
            r"student\.safetensors has \d+ bytes, MANIFEST\.json says \d+",
        ),
        (cut_to_nothing, "optimizer.safetensors", r"optimizer\.safetensors has 0 bytes"),
        (flip_a_bit, "student.safetensors", r"student\.safetensors does not match its SHA-256 sum"),
        (flip_a_bit, "state.json", r"state\.json does not match its SHA-256 sum"),
        (flip_a_bit, "versions.json", r"versions\.json does not match its SHA-256 sum"),
        (Path.unlink, "student.safetensors", r"'student\.safetensors' is missing"),
        (Path.unlink, "MANIFEST.json", r"MANIFEST\.json is missing"),
        (cut_in_half, "MANIFEST.json", r"MANIFEST\.json is not a manifest"),
    ],
)
def test_a3_a_damaged_newest_is_skipped_with_a_warning(
    run_dir: RunDir, damage: Callable[[Path], None], file: str, reason: str
) -> None:
    newest = save(run_dir, 10, 20)
    damage(newest / file)
    checkpoint, warnings = find_checkpoint(run_dir)
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert len(warnings) == 1
    assert re.search(rf"checkpoint .*step-20 is skipped: {reason}", warnings[0])
    assert names(save(run_dir, 30).parent) in (["step-10", "step-30"], ["step-20", "step-30"])


def test_when_every_checkpoint_is_damaged_each_is_named(run_dir: RunDir) -> None:
    save(run_dir, 10)
    flip_a_bit(save(run_dir, 20) / "student.safetensors")
    (run_dir.checkpoints / "step-10" / "MANIFEST.json").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint in .* \(step-20: student.* SHA-256 sum; step-10: MANIFEST\.json is missing\); restore",
    ) as caught:
        find_checkpoint(run_dir)
    assert caught.value.exit_code == 6


def test_a5_what_was_never_finished_is_ignored_and_cleaned_at_the_next_save(
    run_dir: RunDir,
) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    shutil.copytree(save(run_dir, 10), run_dir.checkpoints / f"step-20.tmp-{dead.pid}")
    (run_dir.checkpoints / f"trash-step-5-{os.getpid()}").mkdir()
    (run_dir.checkpoints / "step-30.tmp-1").mkdir()
    shutil.rmtree(run_dir.checkpoints / "step-10")
    assert find_checkpoint(run_dir) == (None, [])
    (run_dir.checkpoints / "step-20").mkdir()
    save(run_dir, 30)
    # Process 1 lives and owns the files that it writes.
    assert names(run_dir.checkpoints) == ["step-30", "step-30.tmp-1"]


def test_a6_files_of_two_steps_in_one_folder_are_refused(run_dir: RunDir) -> None:
    old, new = save(run_dir, 10), save(run_dir, 20)
    shutil.copy(old / "optimizer.safetensors", new / "optimizer.safetensors")
    checkpoint, warnings = find_checkpoint(run_dir)
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert "optimizer.safetensors does not match its SHA-256 sum" in warnings[0]
    shutil.copy(old / "MANIFEST.json", new / "MANIFEST.json")
    assert "step-20 is skipped: MANIFEST.json is of step 10" in find_checkpoint(run_dir)[1][0]
    shutil.rmtree(new)
    old.rename(new)
    with pytest.raises(CheckpointError, match=r"step-20: MANIFEST\.json is of step 10"):
        find_checkpoint(run_dir)
    manifest = json.loads((new / "MANIFEST.json").read_text())
    (new / "MANIFEST.json").write_text(json.dumps({**manifest, "step": 20}))
    with pytest.raises(CheckpointError, match=r"step-20: state\.json is of step 10"):
        find_checkpoint(run_dir)


def test_a11_other_versions_are_warned_about() -> None:
    now = collect_versions()
    assert set(now) == {
        "python",
        "torch",
        "transformers",
        "safetensors",
        "practicum",
        "threads",
        "machine",
    }
    assert compare_versions(now, now) == []
    assert compare_versions({**now, "threads": 64, "torch": "2.6.0"}, now) == [
        f"torch was 2.6.0 at the checkpoint and is {torch.__version__} now: the resumed run may not be bit-exact",
        f"threads was 64 at the checkpoint and is {now['threads']} now: the resumed run may not be bit-exact",
    ]


def test_recipe_differences_name_each_field() -> None:
    saved = {
        "optimizer": {"learning_rate": 0.001, "betas": [0.9, 0.95]},
        "seed": 1,
        "old": "x",
        "same": {"a": None},
    }
    now = {
        "optimizer": {"learning_rate": 0.01, "betas": [0.9, 0.99]},
        "seed": 1,
        "same": {"a": None},
        "new": {"b": [1]},
    }
    assert list(map(str, find_recipe_differences(saved, now))) == [
        "optimizer.learning_rate: 0.001 in the run, 0.01 now",
        "optimizer.betas[1]: 0.95 in the run, 0.99 now",
        "old: x in the run, absent now",
        'new: absent in the run, {"b": [1]} now',
    ]
    assert list(map(str, find_recipe_differences({"a": "x" * 200}, {"a": "two\nlines"}))) == [
        f'a: {"x" * 77}... in the run, "two\\nlines" now'
    ]
    assert find_recipe_differences(saved, saved) == []


def test_a_resume_may_do_with_other_walls_around_the_verifier() -> None:
    required, without = (
        {"task": {"sandbox": walls, "path": "x"}} for walls in ("require", "best_effort")
    )
    assert (
        list_changed_fields(required, without)
        == list_changed_fields({"task": {"path": "x"}}, required)
        == []
    )
    assert list_changed_fields(required, {"task": {"sandbox": "require", "path": "y"}}) == [
        "task.path: x in the run, y now"
    ]


JSON_FILES = [
    shapes.AFTER,
    shapes.BEFORE,
    shapes.DOCTOR,
    shapes.ENDED,
    shapes.PIPELINE,
    shapes.PIPELINE_SUMMARY,
    shapes.RESOLVED,
    shapes.SAVED_RUN,
    shapes.SCALED,
    shapes.SHOWN_RUN,
    shapes.SUMMARY,
    shapes.TRACKING,
]
JOURNALS = [
    shapes.ALARM,
    shapes.METRICS,
    shapes.REJECTED,
    shapes.ROLLOUT,
    shapes.START,
    shapes.TIMINGS,
    shapes.VOCABULARY,
]

NUMBERS = st.sampled_from([0, -1, 0.5, 1e308, -1e308, 2**70, 10**60, True])
VALUES = st.recursive(
    st.none() | NUMBERS | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "step",
                    "recipe",
                    "identity",
                    "student",
                    "teacher",
                    "answers",
                    "gain",
                    "tokens",
                    "stages",
                    "id",
                ]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
TEXTS = st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode())


@pytest.mark.parametrize(
    ("shape", "row", "problem"),
    [
        (shapes.METRICS, {"step": 1, "tokens": 2, "length": 1}, "rollouts: Field required"),
        (
            shapes.METRICS,
            {"step": 1, "rollouts": 1, "tokens": 2, "length": 1, "cost/flops": None},
            "cost/flops is null",
        ),
        (
            shapes.METRICS,
            {"step": 1, "rollouts": 1, "tokens": 2, "length": 1, "loss": "x"},
            "loss: Input should be a valid number",
        ),
        (
            shapes.TIMINGS,
            {"step": 1, "seconds_rollout": None},
            "seconds_rollout: Input should be a valid number",
        ),
        (shapes.ALARM, {"step": 1}, "id: Field required"),
        (shapes.START, {"first": 1, "versions": {"torch": None, "threads": 1}}, "versions.torch"),
    ],
)
def test_a_damaged_row_is_named_with_its_line_and_field(
    tmp_path: Path, shape: TypeAdapter[Any], row: dict[str, Any], problem: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(
        CheckpointError, match=rf"rows\.jsonl line 1 is damaged \(.*{problem}.*\); put it back"
    ):
        list(read_rows(path, shape))


def damage(read: Callable[[], object]) -> str | None:
    """Return the single line of the CheckpointError that reading raises, or None."""
    try:
        read()
    except CheckpointError as error:
        line = str(error)
    else:
        return None
    assert line.isascii() and "\n" not in line and len(line) < 600
    return line


@given(TEXTS, st.sampled_from(JSON_FILES))
def test_a_json_file_of_any_bytes_is_a_value_or_damage_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, shape: TypeAdapter[Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(text)
    line = damage(lambda: read_json(path, shape))
    assert line is None or re.search(r"any\.json is (damaged|not JSON) ", line)


@given(st.lists(TEXTS, max_size=3), st.sampled_from(JOURNALS))
def test_a_journal_of_any_bytes_is_rows_or_damage_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], shape: TypeAdapter[Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    line = damage(lambda: list(read_rows(path, shape)))
    assert line is None or re.search(r"any\.jsonl line [0-9]+ is ", line)


def resolved_toy(changes: dict[str, object] | None = None) -> dict[str, Any]:
    return resolve_recipe(toy_recipe(Path("models"), changes))


CHANGED: dict[str, tuple[str, object]] = {
    "a number": ("optimizer.learning_rate", 0.5),
    "a list": ("optimizer.betas", [0.8, 0.9]),
    "steps": ("train.steps", 99),
    "a schedule in a number's place": ("optimizer.learning_rate", "linear(0.1, 0.01)"),
    "what a monitor sets": ("monitors", {"M5": {"set": {"optimizer.learning_rate": "x0.5"}}}),
    "a device": ("student.device", "cpu"),
    "a teacher's device": ("teacher.device", "cpu"),
    "how often it is evaluated": ("evaluation.every", 2),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_may_change_is_let_change_by_its_name_alone(name: str) -> None:
    place, value = CHANGED[name]
    saved, now = resolved_toy(), resolved_toy({place: value})
    assert split_changes(saved, now, []) == ([], find_changes(saved, now))
    let, refused = split_changes(saved, now, [place])
    assert let and not refused
    proposed = propose_flags(let, saved)[0]
    assert all(flag.startswith(place) for flag in re.findall(r'"(\S+)"', proposed))


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        ("seed", 1, "every random stream"),
        ("student.model", "other", "weights and moments"),
        ("student.lora", {"rank": 4}, "weights and moments"),
        ("teacher.model", "other", "stage of a pipeline"),
        ("task.longest", 5, "prompts"),
        ("objective.divergence", "jsd(0.5)", "stage of a pipeline"),
        ("rollout.max_staleness", 1, "earlier rollouts"),
        ("rollout.max_new_tokens", 9, "measured with it before training"),
        ("evaluation.samples", 2, "the gain compares"),
        ("prompt_tokens", 9, "selects the prompts"),
    ],
)
def test_what_would_not_fit_cannot_be_allowed(place: str, value: object, why: str) -> None:
    saved, now = resolved_toy(), resolved_toy({place: value})
    key = place if place != "objective.divergence" else "objective"
    with pytest.raises(RecipeError, match=rf"^allow_changed=..{re.escape(key)}..: .*{why}"):
        split_changes(saved, now, [key])
    assert propose_flags(find_changes(saved, now), saved) == []
    assert split_changes(saved, now, ["train"]) == ([], find_changes(saved, now))


def test_a_section_lets_through_only_what_may_change_in_it() -> None:
    saved = resolved_toy()
    assert split_changes(saved, resolved_toy({"evaluation.every": 2}), ["evaluation"])[0]
    with pytest.raises(
        RecipeError, match=r"^evaluation\.samples: 1 in the run, 2 now: .*the gain compares"
    ):
        split_changes(saved, resolved_toy({"evaluation.samples": 2}), ["evaluation"])


def test_longer_answers_may_be_allowed_where_the_evaluation_has_its_own_limit() -> None:
    saved = resolved_toy({"evaluation.max_new_tokens": 5})
    now = resolved_toy({"evaluation.max_new_tokens": 5, "rollout.max_new_tokens": 9})
    assert split_changes(saved, now, ["rollout.max_new_tokens"])[0]


def test_an_unknown_place_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        RecipeError,
        match=r"learning_rate..: .*did you mean 'optimizer.learning_rate'\?",
    ):
        split_changes(resolved_toy(), resolved_toy(), ["learning_rate"])


def test_of_every_section_it_is_known_whether_it_may_change() -> None:
    sections = Recipe.model_fields.keys() - {"schedules"}
    assert all((name in MUST_STAY) is not bool(MAY_CHANGE.fullmatch(name)) for name in sections)


def test_a_backend_says_which_of_its_settings_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved, now = (
        {"backend": {"type": "local", "sampling_batch": n, "chunk_tokens": n}} for n in (1, 2)
    )
    assert list_changed_fields(saved, now) == ["backend.chunk_tokens: 1 in the run, 2 now"]
    monkeypatch.setattr(local.Config, "not_compared", frozenset({"chunk_tokens"}))
    assert list_changed_fields(saved, now) == ["backend.sampling_batch: 1 in the run, 2 now"]


def test_parts_that_changed_appeared_or_went_are_named() -> None:
    saved = {"student/config.json": "1", "student/tokenizer.json": "1", "prompts": "1"}
    now = {"student/config.json": "2", "prompts": "1", "student/vocab.json": "1"}
    assert list_changed_parts(saved, now) == [
        "student/config.json changed",
        "student/tokenizer.json is gone",
        "student/vocab.json is new",
    ]
    assert list_changed_parts(now, now) == []


# ------------------------------------------------------------------------------------------------ crashes, full disks

SAVE = """
    from pathlib import Path
    import torch
    from practicum.run_dir import RunDir, save_checkpoint
    run_dir = RunDir.open(Path(arguments[0]))
    for step in map(int, arguments[1:]):
        save_checkpoint(run_dir, step, {"student": {"w": torch.full((64,), float(step))}}, {"new": True})
"""


@pytest.mark.parametrize(
    ("point", "found", "left"),
    [
        ("save.after_tensors:1", 20, ["step-10", "step-20", "step-30.tmp-PID"]),
        ("save.before_rename:1", 20, ["step-10", "step-20", "step-30.tmp-PID"]),
        ("save.after_rename:1", 30, ["step-10", "step-20", "step-30"]),
        ("update:1, save.before_rename:2", 30, ["step-20", "step-30", "step-40.tmp-PID"]),
    ],
)
def test_a_crash_at_a_named_point_leaves_the_old_set_or_the_new_one(
    run_dir: RunDir, child: Child, point: str, found: int, left: list[str]
) -> None:
    save(run_dir, 10, 20)
    assert child(SAVE, run_dir.path, 30, 40, PRACTICUM_FAULT=point) == -signal.SIGKILL
    assert [name.split("-")[:2] for name in names(run_dir.checkpoints)] == [
        name.split("-")[:2] for name in left
    ]
    checkpoint, warnings = find_checkpoint(run_dir)
    assert checkpoint is not None
    assert (checkpoint.step, warnings) == (found, [])
    save(run_dir, 50)
    assert names(run_dir.checkpoints) == [f"step-{found}", "step-50"]


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run_dir, 20, keep=1)
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if ".tmp-" in source.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(
            ResourceError,
            match=r"step 20 cannot be saved in .*: Input/output error; check the disk",
        ):
            save(run_dir, 20, keep=1)
    assert names(run_dir.checkpoints) == ["step-20.old-0"]
    checkpoint, warnings = find_checkpoint(run_dir)
    assert checkpoint is not None
    assert (checkpoint.step, warnings) == (20, [])
    save(run_dir, 20, keep=1)
    assert names(run_dir.checkpoints) == ["step-20"]


@pytest.mark.long
def test_a8_thirty_kills_at_random_moments_of_a_save_leave_a_checkpoint_each(
    run_dir: RunDir, child: Child
) -> None:
    code = """
        import os, random, signal, sys, time
        from pathlib import Path
        import torch
        from practicum.run_dir import RunDir, find_checkpoint, save_checkpoint

        run_dir = RunDir.open(Path(arguments[0]))
        tensors = {stem: {"w": torch.randn(50_000)} for stem in ("student", "optimizer")}
        start = time.monotonic()
        save_checkpoint(run_dir, 1, tensors, {}, keep=1)
        once = time.monotonic() - start
        moments = random.Random(0)
        newest, interrupted = 1, 0
        for _ in range(30):
            pid = os.fork()
            if pid == 0:
                step = newest
                while True:  # every second save replaces a step that is there
                    step += os.getpid() % 2 if step == newest else 1
                    save_checkpoint(run_dir, step, tensors, {}, keep=1)
            time.sleep(moments.uniform(0.0, 4 * once))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            left = os.listdir(run_dir.checkpoints)
            interrupted += any(".tmp-" in name or "trash-" in name for name in left)
            checkpoint, warnings = find_checkpoint(run_dir)
            assert checkpoint is not None and not warnings, (left, warnings)
            assert checkpoint.step >= newest, (left, newest)
            assert torch.equal(checkpoint.read_tensors("student")["w"], tensors["student"]["w"])
            assert len(left) <= 4, left
            newest = checkpoint.step
        assert interrupted >= 3, interrupted  # the kills did land inside saves
        save_checkpoint(run_dir, newest + 1, tensors, {}, keep=1)
        assert os.listdir(run_dir.checkpoints) == [f"step-{newest + 1}"]
    """
    assert child(code, run_dir.path) == 0


@pytest.mark.long
def test_b3_a_file_size_limit_names_the_bytes_and_leaves_the_old_checkpoint(
    run_dir: RunDir, child: Child
) -> None:
    save(run_dir, 10)
    code = """
        import os, resource
        from pathlib import Path
        import torch
        from practicum.errors import ResourceError
        from practicum.run_dir import RunDir, find_checkpoint, save_checkpoint
        run_dir = RunDir.open(Path(arguments[0]))
        tensors = {"student": {"w": torch.zeros(2**20)}}
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        try:
            save_checkpoint(run_dir, 20, tensors, {})
        except ResourceError as error:
            print_ = str(error)
            assert "checkpoint of step 20 needs 4.1 MiB, " in print_, print_
            assert f"MiB free in {run_dir.checkpoints}: File too large; raise the file size limit" in print_, print_
        else:
            raise SystemExit(1)
        assert os.listdir(run_dir.checkpoints) == ["step-10"]
        assert find_checkpoint(run_dir)[0].step == 10
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        save_checkpoint(run_dir, 20, tensors, {})
        assert find_checkpoint(run_dir)[0].step == 20
    """
    assert child(code, run_dir.path) == 0


@pytest.mark.long
def test_a_checkpoint_that_does_not_fit_is_refused_before_the_training(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(run_dir.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=13 * 2**20))
    check_space(run_dir, 12 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=12 * 2**20))
    check_space(run_dir, 6 * 2**20)
    with pytest.raises(
        ResourceError,
        match=r"a checkpoint of this run needs 12\.1 MiB, 12\.0 MiB free in .*; free space",
    ):
        check_space(run_dir, 12 * 2**20)


@pytest.mark.long
def test_b3_a_full_disk_names_the_bytes_before_and_while_writing(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    wrapped = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        'mount -t tmpfs -o size=2m none "$0" && exec "$@"',
        str(mount),
    ]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*wrapped, "true"], capture_output=True).returncode != 0
    ):
        pytest.skip("needs unshare -rm and mount to make a 2 MiB disk")
    code = """
        import os, shutil, sys
        from pathlib import Path
        import torch
        from practicum.errors import ResourceError
        from practicum.run_dir import Journal, RunDir, find_checkpoint, save_checkpoint

        def expect(step, tensors):
            try:
                save_checkpoint(run_dir, step, tensors, {}, keep=1)
            except ResourceError as error:
                text = str(error)
                assert f"checkpoint of step {step} needs " in text, text
                assert f"MiB free in {run_dir.checkpoints}: No space left on device; free space" in text, text
                assert os.listdir(run_dir.checkpoints) == ["step-1"]
                assert find_checkpoint(run_dir)[0].step == 1
            else:
                raise SystemExit("it was saved")

        run_dir = RunDir.create(Path(sys.argv[1]), "toy")
        save_checkpoint(run_dir, 1, {"student": {"w": torch.ones(1000)}}, {})
        large = {stem: {"w": torch.ones(200_000)} for stem in ("student", "optimizer", "teacher")}
        expect(2, large)
        usage = shutil.disk_usage
        shutil.disk_usage = lambda path: usage("/")  # another process takes the space after the check
        expect(2, large)
        log = Journal(run_dir.rollouts_jsonl, essential=False)
        for step in range(40):
            log.append({"step": step, "text": "x" * 100_000})
        assert 10 < log.dropped < 30, log.dropped
        os.truncate(run_dir.rollouts_jsonl, 0)
        save_checkpoint(run_dir, 2, {"student": large["student"]}, {}, keep=1)
        assert find_checkpoint(run_dir)[0].step == 2
    """
    result = subprocess.run(
        [*wrapped, sys.executable, "-c", textwrap.dedent(code), str(mount)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.long
def test_faults_are_silent_without_the_variable_and_loud_with_nonsense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PRACTICUM_FAULT", raising=False)
    inject_fault("rollout")
    monkeypatch.setenv("PRACTICUM_FAULT", "update:5")
    inject_fault("rollout")
    for text in ("update", "update:0", "update:x", ":3", "update:1,,"):
        monkeypatch.setenv("PRACTICUM_FAULT", text)
        with pytest.raises(
            ValueError, match=r"PRACTICUM_FAULT has .*, which names no moment; write POINT:N"
        ):
            inject_fault("rollout")


def make_run_folder(path: Path) -> Path:
    """Write the files of an earlier run, and a file of the user's."""
    (path / "checkpoints" / "step-1").mkdir(parents=True)
    for name in RUN_FILES:
        if "." in name:
            (path / name).write_text('{"recipe": {}}')
    (path / "notes.txt").write_text("mine")
    return path


def test_overwriting_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "toy")
    elsewhere = tmp_path / "models"
    elsewhere.mkdir()
    (elsewhere / "weights").write_text("kept")
    (folder / "models").symlink_to(elsewhere)
    with RunDir.create(tmp_path, "toy", overwrite=True).lock():
        assert sorted(path.name for path in folder.iterdir()) == [
            "checkpoints",
            "notes.txt",
            "run.lock",
        ]
        assert not any((folder / "checkpoints").iterdir())
    assert (elsewhere / "weights").read_text() == "kept"


def test_an_attempt_that_failed_before_its_first_step_begins_again(tmp_path: Path) -> None:
    """Models from scratch and stored scores are reused; nothing else of the attempt is."""
    folder = make_run_folder(tmp_path / "toy")
    for name in ("metrics.jsonl", "pipeline.json", "checkpoints/step-1"):
        remove(folder / name)
    for name in ("models", "scores"):
        (folder / name).mkdir()
    with RunDir.create(tmp_path, "toy").lock():
        kept = {"checkpoints", "models", "scores", "notes.txt", "run.lock"}
        assert {path.name for path in folder.iterdir()} == kept


def test_nothing_is_removed_before_the_lock_is_held(tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "toy")
    running = RunDir(folder)
    again = RunDir.create(tmp_path, "toy", overwrite=True)
    with running.lock(), pytest.raises(ResourceError, match="is in use by process"), again.lock():
        pass
    assert (folder / "checkpoints" / "step-1").is_dir() and (folder / "metrics.jsonl").is_file()


@pytest.mark.parametrize("recipe", [None, "not JSON", '{"prompt": "a list of recipes"}'])
def test_a_folder_without_a_runs_recipe_is_not_overwritten(
    tmp_path: Path, recipe: str | None
) -> None:
    folder = make_run_folder(tmp_path / "toy")
    (folder / "pipeline.json").unlink()
    (folder / "recipe.json").unlink() if recipe is None else (folder / "recipe.json").write_text(
        recipe
    )
    with pytest.raises(RecipeError, match="it may be no run and nothing of it is removed"):
        RunDir.create(tmp_path, "toy", overwrite=True)
    assert (folder / "metrics.jsonl").is_file()


def test_the_error_about_an_existing_run_is_in_the_words_of_the_caller(tmp_path: Path) -> None:
    make_run_folder(tmp_path / "toy")
    with pytest.raises(RecipeError) as in_python:
        RunDir.create(tmp_path, "toy")
    with spell_for_shell(), pytest.raises(RecipeError) as in_shell:
        RunDir.create(tmp_path, "toy")
    head = f"{tmp_path / 'toy'} already holds a run; use "
    assert str(in_python.value) == (
        f'{head}resume=True to continue it, overwrite=True to replace it, or out="another folder"'
    )
    assert str(in_shell.value) == (
        f"{head}--resume to continue it, --overwrite to replace it, or --out another folder"
    )
