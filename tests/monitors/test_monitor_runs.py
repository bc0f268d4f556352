"""The effects of alarms on a run: they are written and printed, checkpoints stay, runs pause and stop, resumes change nothing.

A teacher that is the student itself (`live`) has nothing to teach, which M22 reports at step 2: a cheap alarm at a known step.
"""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy import (
    RecordingConsole,
    assert_same_run,
    command,
    curve,
    forked,
    rows,
    toy_run,
    write_recipe,
)

from practicum.errors import AlarmError

pytestmark = pytest.mark.long

ITSELF: dict[str, Any] = {
    "teacher": {"type": "self", "weights": "live"},
    "train.steps": 6,
    "train.prompts_per_step": 4,
}


def alarmed(action: Any) -> dict[str, Any]:
    return {**ITSELF, "monitors": {"M22": action}}


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_an_alarm_is_a_row_a_line_and_a_count(models: Path, tmp_path: Path) -> None:
    console = RecordingConsole()
    result = toy_run(models, tmp_path, alarmed("warn"), console=console)
    (alarm,) = rows(result.folder / "alarms.jsonl")
    assert (alarm["step"], alarm["id"], alarm["action"], alarm["n"]) == (2, "M22", "warn", 4)
    assert alarm["patch"] == ["rollout.source=join(dataset)"]
    assert [text for text in console.events if text.startswith("alarm")] == [
        "alarm: M22 no signal (warn) at step 2: signal_share 0; rule: at most 0 of the completions differ from the teacher by "
        "0.0001 nats per token, in 2 steps in a row; try rollout.source=join(dataset)"
    ]
    assert result.summary["alarms"] == {"M22": 1}
    assert console.end["alarms"] == "M22 (1); see alarms.jsonl"


def test_updates_from_nothing_are_skipped_counted_and_told(models: Path, tmp_path: Path) -> None:
    nobody_is_right = {
        "objective.filter": "correct",
        "rollout.max_new_tokens": 1,
        "optimizer.weight_decay": 0.5,
    }
    result = toy_run(models, tmp_path, {**nobody_is_right, "train.checkpoint_every": 4})
    metrics, alarms = rows(result.folder / "metrics.jsonl"), rows(result.folder / "alarms.jsonl")
    assert [row["empty_updates"] for row in metrics] == [1.0] * 4
    assert [row["unsupervised_prompts"] for row in metrics] == [8.0] * 4
    assert result.summary["empty_updates"] == 4 and result.summary["skipped_updates"] == 0
    learned = load_file(result.folder / "checkpoints" / "step-4" / "student.safetensors")
    start = load_file(models / "student" / "model.safetensors")
    assert all(value.equal(start[name]) for name, value in learned.items())
    assert [(alarm["step"], alarm["patch"]) for alarm in alarms if alarm["id"] == "M32"] == [
        (2, ["objective.losses.0.filter=all"])
    ]


def test_answers_without_text_are_told_of_and_not_taken_for_a_loss_of_entropy(
    models: Path, tmp_path: Path
) -> None:
    ends_at_once = {"student.stop": list("abcd"), "train.steps": 14, "train.checkpoint_every": None}
    alarms = rows(toy_run(models, tmp_path, ends_at_once).folder / "alarms.jsonl")
    assert [alarm["step"] for alarm in alarms if alarm["id"] == "M33"] == [2]
    assert "M12" not in {alarm["id"] for alarm in alarms}


def test_a_run_without_trouble_says_nothing_and_has_its_readings(finished: Path) -> None:
    assert rows(finished / "alarms.jsonl") == []
    last = rows(finished / "metrics.jsonl")[-1]
    for name in (
        "p99_gap",
        "concentration",
        "repetition",
        "entropy_gap",
        "probability_error",
        "effective_share",
    ):
        assert name in last
    assert last["probability_error"] == pytest.approx(1.0, abs=1e-4) and last["signal_share"] == 1.0


def test_every_reading_is_told_of(finished: Path, models: Path, tmp_path: Path) -> None:
    changes = {
        "rollout.n": 4,
        "train.steps": 3,
        "evaluation.prompts": 2,
        "evaluation.samples": 2,
        "evaluation.every": 1,
    }
    changes |= {"evaluation.temperature": 1.0, "objective.weights": "entropy_top(0.5)"}
    rows_of = [
        *rows(finished / "metrics.jsonl"),
        *rows(toy_run(models, tmp_path, changes).folder / "metrics.jsonl"),
    ]
    names = {
        re.sub(r"_at_\d+$", "_at_P", name)
        for row in rows_of
        for name in row
        if not name.startswith("cost/")
    }
    docs = Path(__file__).resolve().parents[2] / "docs"
    told = "".join(
        (docs / page).read_text(encoding="utf-8") for page in ("monitors.md", "run-folder.md")
    )
    assert {name for name in names if f"`{name}`" not in told} <= {"step"}
    assert {
        "weightless",
        "unique_answers",
        "pass_gap",
        "heldout_unique",
        "heldout_gain_high",
    } <= names


def test_an_alarm_that_is_off_or_only_logged_is_not_told(models: Path, tmp_path: Path) -> None:
    for name, action, count in (("a", "log", 1), ("b", "off", 0), ("c", False, 0)):
        console = RecordingConsole()
        result = toy_run(models, tmp_path / name, alarmed(action), console=console)
        assert len(rows(result.folder / "alarms.jsonl")) == count
        assert not any(text.startswith("alarm") for text in console.events)


def test_a_checkpoint_of_an_alarm_is_never_removed_for_its_age(
    models: Path, tmp_path: Path
) -> None:
    changes = {**alarmed("checkpoint"), "train.checkpoint_every": 1, "train.keep_checkpoints": 1}
    folder = toy_run(models, tmp_path, changes).folder
    assert checkpoints(folder) == {"step-2", "step-6"}
    assert (
        (folder / "checkpoints" / "step-2" / "TAG")
        .read_text()
        .startswith("M22 no signal (checkpoint) at step 2")
    )


def test_a_pause_saves_and_the_resumed_run_goes_on_to_the_same_end(
    models: Path, tmp_path: Path
) -> None:
    pausing = {**alarmed("pause"), "train.checkpoint_every": None}
    with pytest.raises(
        AlarmError,
        match=r"paused by M22 .* at step 2: .* try .*; the state is saved: .* resume=True",
    ) as caught:
        toy_run(models, tmp_path / "paused", pausing)
    assert caught.value.exit_code == 10 and "\n" not in str(caught.value)
    folder = tmp_path / "paused" / "toy"
    assert checkpoints(folder) == {"step-2"}
    toy_run(models, tmp_path / "paused", pausing, resume=True)
    whole = toy_run(
        models, tmp_path / "whole", {**alarmed("checkpoint"), "train.checkpoint_every": None}
    ).folder
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert [row["step"] for row in rows(folder / "alarms.jsonl")] == [2], (
        "what has been looked at is not told again"
    )


def test_a_stop_keeps_nothing_and_a_milder_monitor_goes_on_from_before(
    models: Path, tmp_path: Path
) -> None:
    stopping = {**alarmed("stop"), "train.checkpoint_every": 1}
    for resume in (False, True):
        with pytest.raises(
            AlarmError,
            match=r"stopped by M22 .* resume from it with resume=True, .*monitors\.M22=warn",
        ):
            toy_run(models, tmp_path, stopping, resume=resume)
        assert checkpoints(tmp_path / "toy") == {"step-1"}
    result = toy_run(
        models, tmp_path, {**alarmed("warn"), "train.checkpoint_every": 1}, resume=True
    )
    assert result.summary["alarms"] == {"M22": 1}


FINISHING = {**alarmed("finish"), "train.checkpoint_every": None, "evaluation.prompts": 4}


def test_a_finished_run_is_that_of_fewer_steps(models: Path, tmp_path: Path) -> None:
    console = RecordingConsole()
    finished = toy_run(models, tmp_path / "finished", FINISHING, console=console)
    short = toy_run(models, tmp_path / "short", {**FINISHING, "train.steps": 2})
    for name in ("metrics.jsonl", "rollouts.jsonl", "before.json", "after.json"):
        assert (finished.folder / name).read_bytes() == (short.folder / name).read_bytes(), name
    assert (
        checkpoints(finished.folder) == {"step-2"} and (finished.folder / "report.html").is_file()
    )
    assert (finished.summary["ended"], finished.summary["steps"]) == (
        "finished by M22 no signal",
        2,
    )
    assert short.summary["ended"] == "all steps done", (
        "at the last step there is nothing left to end"
    )
    assert finished.summary["after"] == short.summary["after"]
    assert "finished after step 2 of 6, as M22 asks" in console.events
    assert console.end["ended"] == "finished by M22 no signal, after step 2 of 6"


PLATEAU = {
    "train.steps": 9,
    "train.checkpoint_every": 2,
    "evaluation.prompts": 8,
    "evaluation.every": 1,
    "monitors": {"M31": {"action": "finish", "change": 1.0, "level": -1.0}},
}
"""No accuracy rises by more than 1, so that M31 asks to finish after its third evaluation."""


@pytest.mark.parametrize(
    ("staleness", "points"),
    [(0, ("update:3", "save.after_rename:2")), (2, ("save.after_rename:2",))],
)
def test_a_run_that_finishes_is_the_same_however_often_it_was_killed(
    models: Path, tmp_path: Path, staleness: int, points: tuple[str, ...]
) -> None:
    changes = {**PLATEAU, "rollout.max_staleness": staleness}
    whole = toy_run(models, tmp_path / "whole", changes)
    assert (whole.summary["ended"], whole.summary["steps"]) == ("finished by M31 plateau", 3)
    assert rows(whole.folder / "alarms.jsonl")[-1]["id"] == "M31"
    assert (
        "M31 plateau (finish) at step 3"
        in (whole.folder / "checkpoints" / "step-3" / "TAG").read_text()
    )
    for point in points:
        folder = tmp_path / point / "toy"
        assert (
            forked(
                lambda out=folder.parent: toy_run(models, out, changes), {"PRACTICUM_FAULT": point}
            )
            == 137
        )
        toy_run(models, folder.parent, changes, resume=True)
        assert_same_run(whole.folder, folder)
        begun = rows(folder / "starts.jsonl")[-1]["first"]
        assert begun == (4 if point == "save.after_rename:2" else 3), (
            "what had finished is not trained further"
        )


def test_a_graver_action_goes_before_a_finish(models: Path, tmp_path: Path) -> None:
    both = {
        **PLATEAU,
        **ITSELF,
        "monitors": {**PLATEAU["monitors"], "M22": {"action": "pause", "persistence": 3}},
    }
    with pytest.raises(AlarmError, match=r"paused by M22 .* at step 3"):
        toy_run(models, tmp_path, both)
    result = toy_run(models, tmp_path, both, resume=True)
    assert (result.summary["ended"], result.summary["steps"]) == ("finished by M31 plateau", 3)


def test_a_change_that_the_recipe_asks_for_survives_a_kill(models: Path, tmp_path: Path) -> None:
    changing = {
        **alarmed({"set": {"optimizer.learning_rate": "x0.5"}}),
        "train.checkpoint_every": 3,
        "evaluation.prompts": 2,
        "evaluation.every": 2,
    }
    whole = toy_run(models, tmp_path / "whole", changing).folder
    assert curve(whole, "learning_rate") == pytest.approx([0.003] * 2 + [0.0015] * 4)
    assert rows(whole / "alarms.jsonl")[0]["set"] == {"optimizer.learning_rate": 0.0015}
    evaluated = [row["step"] for row in rows(whole / "metrics.jsonl") if "heldout_accuracy" in row]
    assert evaluated == [2, 4, 6], "a run that continues after its last step also has its row"
    for point in ("update:2", "update:5"):
        folder = tmp_path / point / "toy"
        assert (
            forked(
                lambda out=folder.parent: toy_run(models, out, changing), {"PRACTICUM_FAULT": point}
            )
            == 137
        )
        toy_run(models, folder.parent, changing, resume=True)
        assert_same_run(whole, folder)


def test_the_command_line_ends_with_10_and_one_line(models: Path, tmp_path: Path) -> None:
    path, output = write_recipe(models, tmp_path / "mine.yaml", alarmed("pause")), tmp_path / "said"
    assert forked(command("run", str(path), "--out", str(tmp_path / "runs")), output=output) == 10
    errors = [line for line in output.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(
        "error: paused by M22 no signal (pause) at step 2"
    )
    resumed = command(
        "run", str(path), "monitors.M22=off", "--out", str(tmp_path / "runs"), "--resume"
    )
    assert forked(resumed, output=output) == 0


def test_a_teacher_that_lost_its_weights_pauses_the_run(models: Path, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    shutil.copytree(models / "teacher", lost)
    weights = load_file(lost / "model.safetensors")
    save_file(
        {name: torch.zeros_like(weight) for name, weight in weights.items()},
        lost / "model.safetensors",
        {"format": "pt"},
    )
    teacher = {"type": "model", "model": str(lost), "residency": "disk"}
    with pytest.raises(AlarmError, match=r"paused by M35 .* at step 1: constant_teacher 1;"):
        toy_run(models, tmp_path / "run", {"teacher": teacher, "rollout.max_new_tokens": 16})
