"""A resumed run finds every damage of the journals up to its checkpoint, and counts rows that were lost."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from toy import JOURNALS, assert_same_run, forked, toy_run

from practicum.errors import CheckpointError, ResourceError
from practicum.report import write_report
from practicum.run_dir import Journal
from practicum.runs import RunResult

STEPS = {"train.steps": 6, "train.checkpoint_every": 2, "train.prompts_per_step": 4}


def flip_bit(line: bytes) -> bytes:
    return bytes([line[0] ^ 1]) + line[1:]


def change_digit(line: bytes) -> bytes:
    # Times differ from run to run, so no certain digit is in their row.
    return re.sub(rb"\d", lambda digit: b"%d" % (9 - int(digit[0])), line, count=1)


DAMAGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "last row with a flipped bit": lambda lines: [*lines[:-1], flip_bit(lines[-1])],
    "last row of zeros": lambda lines: [*lines[:-1], b"\x00" * (len(lines[-1]) - 1) + b"\n"],
    "last row dropped": lambda lines: lines[:-1],
    "middle row dropped": lambda lines: [lines[0], *lines[2:]],
    "a row twice": lambda lines: [lines[0], *lines],
    "a digit changed": lambda lines: [lines[0], change_digit(lines[1]), *lines[2:]],
    "emptied": lambda lines: [],
}


@pytest.fixture(scope="module")
def killed(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that was killed in its fifth step, with two of its checkpoints saved."""
    out = tmp_path_factory.mktemp("killed")
    fault = {"PRACTICUM_FAULT": "rollout:5"}
    assert forked(lambda: toy_run(models, out, STEPS), fault) == 137
    return out


@pytest.mark.parametrize("damage", [*DAMAGES, "removed"])
@pytest.mark.parametrize("name", ["metrics", "rollouts", "vocabulary", "timings"])
def test_a_damaged_journal_is_not_resumed(
    models: Path, killed: Path, tmp_path: Path, name: str, damage: str
) -> None:
    out = shutil.copytree(killed, tmp_path / "out")
    path = out / "toy" / f"{name}.jsonl"
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(b"".join(DAMAGES[damage](path.read_bytes().splitlines(keepends=True))))
    before = {file.name: file.read_bytes() for file in (out / "toy").glob("*.json*")}
    with pytest.raises(CheckpointError) as refusal:
        toy_run(models, out, STEPS, resume=True)
    text = str(refusal.value)
    assert f"{name}.jsonl" in text and "\n" not in text and refusal.value.exit_code == 6
    assert damage == "removed" or "line" in text
    # Only the record of the error was written, so the file can be restored from a copy.
    after = {file.name: file.read_bytes() for file in (out / "toy").glob("*.json*")}
    after.pop("error.json")
    assert before == after


def test_the_line_of_a_damage_is_named(models: Path, killed: Path, tmp_path: Path) -> None:
    out = shutil.copytree(killed, tmp_path / "out")
    path = out / "toy" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], flip_bit(lines[2]), *lines[3:]]))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl line 3 differs from the lines"):
        toy_run(models, out, STEPS, resume=True)


def test_rows_after_the_checkpoint_may_be_torn(models: Path, killed: Path, tmp_path: Path) -> None:
    whole = toy_run(models, tmp_path / "whole", STEPS).folder
    out = shutil.copytree(killed, tmp_path / "out")
    for name in JOURNALS:
        with (out / "toy" / name).open("ab") as file:
            file.write(b'{"step": 5, "\x00\n' + b"\xff\n" + b'{"step"')
    assert_same_run(whole, toy_run(models, out, STEPS, resume=True).folder)


def test_lost_rows_are_counted_over_a_resume_and_shown(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Journal.append

    def fail(journal: Journal, row: dict[str, object]) -> None:
        if journal.path.name == "rollouts.jsonl" and row["step"] in (1, 2, 5):
            journal.dropped += 1
        else:
            append(journal, row)

    monkeypatch.setattr(Journal, "append", fail)
    out = tmp_path / "out"
    assert forked(lambda: toy_run(models, out, STEPS), {"PRACTICUM_FAULT": "update:6"}) == 137
    result = toy_run(models, out, STEPS, resume=True)
    assert result.lost_rows == {"rollouts.jsonl": 12}
    summary = json.loads((result.folder / "summary.json").read_text())
    assert summary["lost_rows"] == {"rollouts.jsonl": 12}
    assert RunResult.read(result.folder).lost_rows == result.lost_rows
    write_report(result.folder)
    page = (result.folder / "report.html").read_text()
    assert "12 rows of rollouts.jsonl could not be written" in page
    with pytest.raises(ResourceError, match=r"the run is complete, but 12 rows of rollouts\.jsonl"):
        result.check_rows()


def test_a_checkpoint_costs_the_same_after_many_rows(tmp_path: Path) -> None:
    """Check that digests are updated row by row, and their record has a bounded size."""
    journal = Journal(tmp_path / "rows.jsonl", essential=True)
    reads = os.stat(tmp_path / "rows.jsonl").st_size
    for number in range(5000):
        journal.append({"step": number})
    record = journal.record()
    assert (reads, record.rows, len(record.marks) <= 512) == (0, 5000, True)
    journal.close()
    again = Journal(tmp_path / "rows.jsonl", essential=True)
    assert again.record() == record
    again.close()
