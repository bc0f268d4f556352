"""A run is a function of its recipe: stopped anywhere and resumed, it leaves the bytes of an uninterrupted run."""

import errno
import itertools
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from toy import (
    RecordingConsole,
    assert_same_run,
    curve,
    forked,
    in_check,
    make_model,
    rows,
    toy_recipe,
    toy_run,
)

from practicum.errors import CheckpointError, RecipeError, ResourceError
from practicum.report import write_report
from practicum.run_dir import saving
from practicum.run_dir.checkpoints import step_folders
from practicum.runs import observers, open_run, open_student, run
from practicum.runs.assembly import assemble_run
from practicum.runs.resuming import list_length_dependent
from practicum.studies.compare.outcomes import read_outcome

STEPS = {"train.steps": 6, "train.checkpoint_every": 2, "train.prompts_per_step": 4}

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several completions, tempered, cut to a nucleus": {
        "rollout.n": 3,
        "rollout.temperature": 0.8,
        "rollout.top_p": 0.9,
        "rollout.top_k": 9,
        "objective": {
            "signal": "sampled",
            "estimator": "score_function(gamma=1, baseline=group_mean)",
            "correction": "ratio",
        },
    },
    "cosine after a warm-up, in micro-batches": {
        "optimizer.schedule": "cosine",
        "optimizer.warmup_steps": 3,
        "optimizer.weight_decay": 0.1,
        "backend.micro_batch_tokens": 24,
    },
    "adapters": {"student.lora": {"rank": 4, "alpha": 8}, "optimizer.learning_rate": 0.02},
    "last layer only, from the states that sampling kept below it": {
        "student.trainable_layers": 1,
        "student.model": {"hidden_size": 32, "layers": 2, "heads": 2, "seed": 1},
        "rollout.max_new_tokens": 9,
        "evaluation.prompts": 4,
    },
    "dropout under a following teacher": {
        "student.model": {"hidden_size": 32, "layers": 1, "heads": 2, "dropout": 0.2, "seed": 1},
        "student.dropout": True,
        "teacher": {
            "type": "privileged",
            "teacher": {"type": "self", "weights": "ema", "rate": 0.3},
            "reference": "{answer}",
        },
    },
    "a teacher copied now and then": {
        "student.lora": {"rank": 4, "alpha": 8},
        "teacher": {
            "type": "privileged",
            "teacher": {"type": "self", "weights": "periodic", "period": 3},
            "system": "ab",
        },
    },
}


@pytest.fixture(scope="module")
def uninterrupted(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run six steps without interruption, with evaluations."""
    return toy_run(
        models, tmp_path_factory.mktemp("whole"), STEPS | {"evaluation.prompts": 4}
    ).folder


@pytest.mark.parametrize("name", in_check(VARIANTS, "plain"))
def test_stopped_and_resumed_twice_is_uninterrupted(
    models: Path, tmp_path: Path, name: str
) -> None:
    changes = STEPS | VARIANTS[name]
    whole = toy_run(models, tmp_path / "whole", changes).folder
    out = tmp_path / "stopped"
    assert forked(lambda: toy_run(models, out, changes), {"PRACTICUM_FAULT": "update:4"}) == 137
    assert (
        forked(lambda: toy_run(models, out, changes, resume=True), {"PRACTICUM_FAULT": "score:3"})
        == 137
    )
    stopped = toy_run(models, out, changes, resume=True).folder
    assert_same_run(whole, stopped)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"rollout.max_staleness": 1}, marks=pytest.mark.long),
        pytest.param({"train.save_in_background": True}, marks=pytest.mark.long),
    ],
    ids=["plain", "ahead", "in the background"],
)
def test_checkpoints_by_time_change_no_byte_and_a_killed_run_goes_on_from_them(
    models: Path, tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = STEPS | {"train.checkpoint_every": None, "train.keep_checkpoints": 9} | changes
    whole = toy_run(models, tmp_path / "whole", changes).folder
    assert [step for step, _ in step_folders(whole / "checkpoints")] == [6]
    # Each look at the clock is five minutes after the last one.
    clock = itertools.count(0, 300)
    monkeypatch.setattr(observers, "monotonic", lambda: next(clock))
    timed = toy_run(models, tmp_path / "timed", changes).folder
    assert len(list(step_folders(timed / "checkpoints"))) > 2
    assert_same_run(whole, timed)
    out = tmp_path / "killed"
    assert forked(lambda: toy_run(models, out, changes), {"PRACTICUM_FAULT": "update:5"}) == 137
    resumed = toy_run(models, out, changes, resume=True).folder
    assert rows(resumed / "starts.jsonl")[-1]["first"] > 1
    assert_same_run(whole, resumed)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        "rollout:1",
        "score:6",
        "save.after_tensors:2",
        "save.before_rename:1",
        "save.after_rename:2",
        "save.after_rename:3",
    ],
)
def test_killed_at_any_point_the_resumed_run_is_the_same(
    models: Path, uninterrupted: Path, tmp_path: Path, fault: str
) -> None:
    changes = STEPS | {"evaluation.prompts": 4}
    assert forked(lambda: toy_run(models, tmp_path, changes), {"PRACTICUM_FAULT": fault}) == 137
    cut = toy_run(models, tmp_path, changes, resume=True).folder
    assert_same_run(uninterrupted, cut)
    debris = [
        path.name
        for path in cut.rglob("*")
        if ".tmp" in path.name or path.name.startswith("trash-")
    ]
    assert debris == []


BEHIND = {
    "train.save_in_background": True,
    "train.checkpoint_every": 1,
    "teacher": VARIANTS["a teacher copied now and then"]["teacher"],
}


@pytest.mark.parametrize(
    "fault", ["save.after_tensors:3", pytest.param("save.before_rename:2", marks=pytest.mark.long)]
)
def test_checkpoints_written_in_the_background_are_those_of_a_run_that_waits(
    models: Path, tmp_path: Path, fault: str
) -> None:
    changes = STEPS | BEHIND
    waiting = toy_run(
        models, tmp_path / "waiting", changes | {"train.save_in_background": False}
    ).folder
    out = tmp_path / "behind"
    assert forked(lambda: toy_run(models, out, changes), {"PRACTICUM_FAULT": fault}) == 137
    kept = sorted(
        path.name for path in (out / "toy" / "checkpoints").iterdir() if ".tmp" not in path.name
    )
    assert kept == [f"step-{step}" for step in range(1, int(fault[-1]))]
    assert_same_run(waiting, toy_run(models, out, changes, resume=True).folder)


def test_a_disk_that_fills_up_in_the_background_ends_the_run_in_one_line(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "digest_file", fill)
    with pytest.raises(
        ResourceError, match=r"^checkpoint of step 1 needs .* MiB, .* MiB free in .*: No space"
    ):
        toy_run(models, tmp_path, STEPS | BEHIND)
    assert len(rows(tmp_path / "toy" / "metrics.jsonl")) in (2, 3)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_every_architecture_trains_and_resumes(
    models: Path, tmp_path: Path, architecture: str
) -> None:
    changes = {
        "student.model": {
            "architecture": architecture,
            "hidden_size": 32,
            "layers": 2,
            "heads": 2,
            "seed": 3,
        },
        "train.steps": 3,
        "train.checkpoint_every": 1,
    }
    whole = toy_run(models, tmp_path / "whole", changes).folder
    assert (
        forked(lambda: toy_run(models, tmp_path / "cut", changes), {"PRACTICUM_FAULT": "update:2"})
        == 137
    )
    assert_same_run(whole, toy_run(models, tmp_path / "cut", changes, resume=True).folder)


def test_the_same_recipe_gives_the_same_bytes(models: Path, finished: Path, tmp_path: Path) -> None:
    assert_same_run(finished, toy_run(models, tmp_path, {"evaluation.prompts": 8}).folder)


def test_another_seed_gives_other_rollouts(models: Path, finished: Path, tmp_path: Path) -> None:
    other = toy_run(models, tmp_path, {"evaluation.prompts": 8, "seed": 1}).folder
    assert (other / "rollouts.jsonl").read_bytes() != (finished / "rollouts.jsonl").read_bytes()


@pytest.mark.long
def test_how_much_is_held_at_once_changes_rounding_only(
    models: Path, finished: Path, tmp_path: Path
) -> None:
    limits = {
        "backend.micro_batch_tokens": 10,
        "backend.chunk_tokens": 3,
        "backend.sampling_batch": 3,
    }
    small = toy_run(models, tmp_path, {"evaluation.prompts": 8, **limits}).folder
    assert curve(small, "reverse_kl") == pytest.approx(curve(finished, "reverse_kl"), rel=1e-4)


def test_a_run_folder_holds_one_row_a_step_and_one_a_rollout(finished: Path) -> None:
    assert [row["step"] for row in rows(finished / "metrics.jsonl")] == [1, 2, 3, 4]
    recorded = rows(finished / "rollouts.jsonl")
    assert len(recorded) == 32
    for row in recorded:
        assert len(row["tokens"]) == len(row["teacher_logprobs"]) == len(row["sampling_logprobs"])
        assert all(number <= 0 for number in row["teacher_logprobs"])
        for name in ("student_entropy", "teacher_entropy", "weight"):
            assert len(row[name]) == len(row["tokens"]) and all(
                number >= 0 for number in row[name]
            ), name
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["rollouts"] == 32 and summary["skipped_updates"] == 0
    assert summary["tokens"] == sum(len(row["tokens"]) for row in recorded)
    assert {path.name for path in (finished / "checkpoints").iterdir()} == {"step-2", "step-4"}


def test_resuming_a_finished_run_says_so_and_changes_nothing(
    models: Path, finished: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "toy"
    shutil.copytree(finished, copy)
    stamps = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.name != "run.lock"}
    console = RecordingConsole()
    result = toy_run(models, tmp_path, {"evaluation.prompts": 8}, resume=True, console=console)
    assert any("nothing to do" in text for text in console.events)
    assert result.summary == json.loads((copy / "summary.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_a_changed_recipe_is_not_resumed_and_every_change_is_named(
    models: Path, tmp_path: Path
) -> None:
    assert forked(lambda: toy_run(models, tmp_path), {"PRACTICUM_FAULT": "update:3"}) == 137
    changes = {"optimizer.learning_rate": 0.5, "rollout.n": 2}
    with pytest.raises(RecipeError, match="recipe changed") as caught:
        toy_run(models, tmp_path, changes, resume=True)
    text = str(caught.value)
    assert (
        "optimizer.learning_rate: 0.003 in the run, 0.5 now" in text
        and "rollout.n: 1 in the run, 2 now" in text
    )


def test_the_refusal_of_a_change_says_how_to_allow_it(cut_short: Path) -> None:
    changes = {"evaluation.prompts": 4, "optimizer.learning_rate": 0.5, "rollout.n": 2, "seed": 1}
    with pytest.raises(RecipeError) as caught:
        toy_run(cut_short / "models", cut_short, changes, resume=True)
    flags = 'allow_changed=["rollout.n", "optimizer.learning_rate"]'
    assert caught.value.problems[-1] == f"or resume the run with the change: {flags}"


@pytest.mark.long
def test_a_run_goes_on_only_as_its_models_decoded(models: Path, tmp_path: Path) -> None:
    assert forked(lambda: toy_run(models, tmp_path), {"PRACTICUM_FAULT": "update:3"}) == 137
    path = tmp_path / "toy" / "recipe.json"
    saved = json.loads(path.read_text())
    decoding = saved["identity"]["student/decoding"]
    saved["identity"]["student/decoding"] = "another program"
    path.write_text(json.dumps(saved))
    with pytest.raises(
        RecipeError,
        match=f"student decoded by another program .* by {decoding} here.*allow_changed=.*backend.decoding",
    ):
        toy_run(models, tmp_path, resume=True)
    toy_run(models, tmp_path, resume=True, allow_changed=["backend.decoding"])
    saved = json.loads(path.read_text())
    assert saved["identity"]["student/decoding"] == decoding
    assert saved["changes"] == [
        {
            "step": 3,
            "field": "student/decoding",
            "before": "another program",
            "after": decoding,
        }
    ]


@pytest.mark.long
def test_an_allowed_change_goes_through_and_is_written_down(models: Path, tmp_path: Path) -> None:
    assert forked(lambda: toy_run(models, tmp_path), {"PRACTICUM_FAULT": "update:3"}) == 137
    changes = {"optimizer.learning_rate": 0.5, "train.updates_per_step": 2}
    console = RecordingConsole()
    allowed = ["optimizer.learning_rate", "train"]
    with_flags = toy_run(
        models, tmp_path, changes, resume=True, allow_changed=allowed, console=console
    ).folder
    assert curve(with_flags, "learning_rate") == [0.003, 0.003, 0.5, 0.5]
    assert json.loads((with_flags / "recipe.json").read_text())["changes"] == [
        {"step": 3, "field": "optimizer.learning_rate", "before": 0.003, "after": 0.5},
        {"step": 3, "field": "train.updates_per_step", "before": 1, "after": 2},
    ]
    assert (
        "changed from step 3 on: optimizer.learning_rate: 0.003 in the run, 0.5 now"
        in console.events
    )
    page = (with_flags / "report.html").read_text()
    assert (
        "changed from step 3 on" in page
        and "optimizer.learning_rate: 0.003 before, 0.5 after" in page
    )
    again = toy_run(
        models, tmp_path, changes, resume=True
    ).folder  # the change that was allowed once now belongs to the run
    assert again == with_flags
    with pytest.raises(RecipeError, match=r"optimizer.learning_rate: 0.5 in the run, 0.003 now"):
        toy_run(models, tmp_path, resume=True)


@pytest.mark.long
def test_a_change_counts_from_the_earliest_step_that_is_done_under_it(
    models: Path, tmp_path: Path
) -> None:
    allowed, changes = ["optimizer.learning_rate"], {**STEPS, "optimizer.learning_rate": 0.5}
    assert forked(lambda: toy_run(models, tmp_path, STEPS), {"PRACTICUM_FAULT": "update:5"}) == 137
    work = lambda: toy_run(models, tmp_path, changes, resume=True, allow_changed=allowed)  # noqa: E731
    assert forked(work, {"PRACTICUM_FAULT": "update:1"}) == 137
    (tmp_path / "toy" / "checkpoints" / "step-4" / "student.safetensors").write_bytes(b"")
    toy_run(models, tmp_path, changes, resume=True)
    (change,) = json.loads((tmp_path / "toy" / "recipe.json").read_text())["changes"]
    assert change["step"] == 3
    assert curve(tmp_path / "toy", "learning_rate") == [0.003] * 2 + [0.5] * 4


@pytest.mark.long
def test_a_finished_run_goes_on_when_it_may_have_more_steps(models: Path, tmp_path: Path) -> None:
    linear = {"optimizer.schedule": "linear"}
    toy_run(models, tmp_path, linear)
    console = RecordingConsole()
    longer = linear | {"train.steps": 6}
    result = toy_run(
        models, tmp_path, longer, resume=True, allow_changed=["train.steps"], console=console
    )
    assert result.summary["steps"] == 6
    rates = curve(result.folder, "learning_rate")
    assert rates == pytest.approx([0.003 * part for part in (1, 3 / 4, 1 / 2, 1 / 4, 2 / 6, 1 / 6)])
    assert any(text.startswith("optimizer.schedule from now on as if") for text in console.events)
    (result.folder / "summary.json").unlink()
    with pytest.raises(
        RecipeError, match=r"train\.steps is 5, and .* has done 6 already; set at least 6"
    ):
        toy_run(
            models,
            tmp_path,
            linear | {"train.steps": 5},
            resume=True,
            allow_changed=["train.steps"],
        )


def test_only_a_run_that_goes_on_can_have_changed(models: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError,
        match=r'allow_changed=\["train"\]: a new run has no earlier settings to change; add resume=True',
    ):
        toy_run(models, tmp_path, allow_changed=["train"])


@pytest.mark.long
def test_what_changes_nothing_may_change_on_resume(models: Path, tmp_path: Path) -> None:
    whole = toy_run(models, tmp_path / "whole").folder
    assert forked(lambda: toy_run(models, tmp_path), {"PRACTICUM_FAULT": "update:3"}) == 137
    changes = {"train.keep_checkpoints": 5, "train.checkpoint_every": 1, "about": "other words"}
    assert_same_run(whole, toy_run(models, tmp_path, changes, resume=True).folder)


def rewrite(path: Path, change: Mapping[str, Any] | str) -> None:
    """Change entries of a JSON file, or write a text."""
    path.write_text(
        change
        if isinstance(change, str)
        else json.dumps(json.loads(path.read_text()) | dict(change))
    )


FILES: dict[str, tuple[Mapping[str, Any] | str, str]] = {
    "student/config.json": ({"rope_theta": 5.0}, "changed"),
    "teacher/config.json": ({"rms_norm_eps": 0.5}, "changed"),
    "teacher/generation_config.json": ({"eos_token_id": 2}, "changed"),
    "student/tokenizer_config.json": ({"model_max_length": 7}, "changed"),
    "student/special_tokens_map.json": ("{}", "is new"),
    "teacher/added_tokens.json": ("{}", "is new"),
    "teacher/vocab.json": ("{}", "is new"),
    "teacher/merges.txt": ("a b", "is new"),
    "student/chat_template.jinja": (
        "{% for m in messages %}{{ m.content }}.{% endfor %}",
        "changed",
    ),
    "teacher/additional_chat_templates/tools.jinja": ("{{ messages }}", "is new"),
    "teacher/model.safetensors.index.json": ("{}", "is new"),
}


@pytest.fixture(scope="module")
def cut_short(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with separate models and a run of them that was killed in its third step."""
    folder = tmp_path_factory.mktemp("cut_short")
    shutil.copytree(models, folder / "models")
    work = lambda: toy_run(folder / "models", folder, {"evaluation.prompts": 4})  # noqa: E731
    assert forked(work, {"PRACTICUM_FAULT": "update:3"}) == 137
    return folder


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_shapes_a_model_is_heard_of_on_resume(cut_short: Path, name: str) -> None:
    change, word = FILES[name]
    path = cut_short / "models" / name
    before = path.read_bytes() if path.is_file() else None
    path.parent.mkdir(exist_ok=True)
    rewrite(path, change)
    try:
        with pytest.raises(RecipeError, match=rf"{re.escape(name)} {word}") as caught:
            toy_run(cut_short / "models", cut_short, {"evaluation.prompts": 4}, resume=True)
        assert "\n" not in str(caught.value)
    finally:
        path.unlink() if before is None else path.write_bytes(before)
        if path.parent.name == "additional_chat_templates":
            path.parent.rmdir()


@pytest.mark.parametrize("role", ["student", "teacher"])
def test_other_weights_under_the_same_name_are_not_resumed(cut_short: Path, role: str) -> None:
    folder = cut_short / "models" / role
    aside = folder.rename(cut_short / f"{role}-aside")
    make_model(folder, seed=9)
    try:
        with pytest.raises(RecipeError, match=rf"{role}/model.safetensors changed"):
            toy_run(cut_short / "models", cut_short, {"evaluation.prompts": 4}, resume=True)
    finally:
        shutil.rmtree(folder)
        aside.rename(folder)


@pytest.mark.long
@pytest.mark.parametrize("file", ["train", "heldout"])
def test_other_rows_are_not_resumed(models: Path, tmp_path: Path, file: str) -> None:
    for name, texts in {"train": ("ab", "bc", "cd"), "heldout": ("ad", "da")}.items():
        lines = [json.dumps({"prompt": text, "answer": text[::-1]}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    task = {
        "type": "jsonl",
        "path": str(tmp_path / "train.jsonl"),
        "heldout": str(tmp_path / "heldout.jsonl"),
    }
    changes = {"task": task, "evaluation.prompts": 4}
    assert (
        forked(lambda: toy_run(models, tmp_path, changes), {"PRACTICUM_FAULT": "update:3"}) == 137
    )
    rows_file = tmp_path / f"{file}.jsonl"
    rows_file.write_text(rows_file.read_text().replace("d", "c", 1))
    part = "prompts" if file == "train" else "heldout"
    with pytest.raises(RecipeError, match=f"began, {part} changed; "):
        toy_run(models, tmp_path, changes, resume=True)


@pytest.mark.long
def test_each_of_several_teachers_and_the_reference_has_its_files(
    models: Path, tmp_path: Path
) -> None:
    for name in ("math", "code", "first"):
        shutil.copytree(models / "teacher", tmp_path / name)
    pool = {name: {"type": "model", "model": str(tmp_path / name)} for name in ("math", "code")}
    changes = {
        "teacher": {"type": "pool", "teachers": pool},
        "reference": {"type": "model", "model": str(tmp_path / "first")},
    }
    built = assemble_run(toy_recipe(models, changes), tmp_path)
    parts = {name.rpartition("/")[0] for name in built.identify()}
    assert parts == {"", "student", "teacher/math", "teacher/code", "reference"}
    assert {
        "teacher/math/config.json",
        "reference/model.safetensors",
        "prompts",
        "heldout",
    } <= built.identify().keys()


@pytest.mark.parametrize("place", ["nothing-there", "empty"])
def test_resuming_what_is_no_run_is_a_clear_mistake(
    models: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises((RecipeError, CheckpointError), match=place):
        toy_run(models, tmp_path, {"name": place}, resume=True)


@pytest.mark.long
def test_resume_under_other_versions_warns_and_goes_on(models: Path, tmp_path: Path) -> None:
    assert forked(lambda: toy_run(models, tmp_path), {"PRACTICUM_FAULT": "update:3"}) == 137
    forge_versions(tmp_path / "toy" / "checkpoints" / "step-2", {"torch": "2.0.0", "threads": 96})
    console = RecordingConsole()
    toy_run(models, tmp_path, resume=True, console=console)
    text = "\n".join(console.events)
    assert "torch was 2.0.0" in text and "threads was 96" in text and "not promised" in text


@pytest.mark.long
def test_weights_of_one_step_with_the_optimizer_of_another_are_not_used(
    models: Path, tmp_path: Path
) -> None:
    assert forked(lambda: toy_run(models, tmp_path, STEPS), {"PRACTICUM_FAULT": "update:5"}) == 137
    folder = tmp_path / "toy" / "checkpoints"
    shutil.copy(
        folder / "step-2" / "optimizer.safetensors", folder / "step-4" / "optimizer.safetensors"
    )
    console = RecordingConsole()
    resumed = toy_run(models, tmp_path, STEPS, resume=True, console=console).folder
    text = "\n".join(console.events)
    assert (
        "step-4 is skipped" in text
        and "optimizer.safetensors" in text
        and "resumed after step 2" in text
    )
    assert_same_run(toy_run(models, tmp_path / "whole", STEPS).folder, resumed)


def test_a_run_that_keeps_no_good_checkpoint_says_which_are_damaged(
    models: Path, tmp_path: Path
) -> None:
    assert forked(lambda: toy_run(models, tmp_path, STEPS), {"PRACTICUM_FAULT": "update:3"}) == 137
    (tmp_path / "toy" / "checkpoints" / "step-2" / "student.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"step-2.*student\.safetensors"):
        toy_run(models, tmp_path, STEPS, resume=True)


def test_the_student_of_a_run_has_the_weights_of_its_last_checkpoint(finished: Path) -> None:
    _, student = open_student(finished)
    saved = load_file(finished / "checkpoints" / "step-4" / "student.safetensors")
    assert student.weights is not None
    assert all(student.weights[name].equal(value) for name, value in saved.items())


def test_a_run_knows_its_own_recipe(models: Path, finished: Path) -> None:
    assert open_run(finished)[1] == toy_recipe(models, {"evaluation.prompts": 8})


def test_a_recipe_can_be_given_as_a_file_with_overrides(models: Path, tmp_path: Path) -> None:
    from toy import write_recipe

    path = write_recipe(models, tmp_path / "mine.yaml", {"name": "mine"})
    result = run(path, ["train.steps=1", "train.prompts_per_step=2"], out=tmp_path / "out")
    assert result.folder == tmp_path / "out" / "mine" and result.summary["rollouts"] == 2


def forge_versions(checkpoint: Path, changes: Mapping[str, Any]) -> None:
    """Rewrite the provenance of a checkpoint, including its manifest."""
    import hashlib

    path, manifest_path = checkpoint / "versions.json", checkpoint / "MANIFEST.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    manifest = json.loads(manifest_path.read_text())
    manifest["files"]["versions.json"] = {
        "size": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    manifest_path.write_text(json.dumps(manifest))


@pytest.mark.long
def test_a_lost_first_evaluation_is_not_measured_on_trained_weights(
    models: Path, tmp_path: Path
) -> None:
    changes = {"evaluation.prompts": 4}
    assert (
        forked(lambda: toy_run(models, tmp_path, changes), {"PRACTICUM_FAULT": "rollout:4"}) == 137
    )
    (tmp_path / "toy" / "before.json").unlink()
    summary = toy_run(models, tmp_path, changes, resume=True).summary
    assert summary["before"] is None
    assert summary["gain"] is None
    assert summary["after"] is not None


DAMAGED = {
    "not UTF-8": lambda text: b"\xff\xfe{" + text,
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: b"",
    "an empty object": lambda text: b"{}\n",
    "a list": lambda text: b"[]\n",
}
"""Ways in which a JSON file breaks."""


@pytest.mark.parametrize("how", DAMAGED)
@pytest.mark.parametrize("name", ["recipe.json", "before.json", "after.json", "summary.json"])
def test_a_damaged_file_is_named_by_whatever_reads_it(
    finished: Path, tmp_path: Path, name: str, how: str
) -> None:
    folder = tmp_path / "toy"
    shutil.copytree(finished, folder)
    (folder / name).write_bytes(DAMAGED[how]((folder / name).read_bytes()))
    readers = [lambda: write_report(folder)]
    readers += (
        [lambda: open_run(folder), lambda: open_student(folder)] if name == "recipe.json" else []
    )
    readers += (
        [lambda: read_outcome("a", 0, folder, tmp_path)]
        if name in ("after.json", "summary.json")
        else []
    )
    for read in readers:
        with pytest.raises(
            CheckpointError, match=rf"{re.escape(name)} is (damaged|not JSON) .*put it back"
        ) as caught:
            read()
        assert "\n" not in str(caught.value) and caught.value.exit_code == 6


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["recipe.json", "before.json", "metrics.jsonl", "vocabulary.jsonl"]
)
def test_a_run_with_a_damaged_file_is_not_resumed(models: Path, tmp_path: Path, name: str) -> None:
    changes = {"evaluation.prompts": 4}
    assert (
        forked(lambda: toy_run(models, tmp_path, changes), {"PRACTICUM_FAULT": "update:3"}) == 137
    )
    (tmp_path / "toy" / name).write_text('{"step": 1}\n')
    where = re.escape(name) + (" line 1" if name.endswith("l") else "")
    with pytest.raises(
        CheckpointError,
        match=rf"{where} (is damaged \(\w+: Field required\)|differs from the lines)",
    ) as caught:
        toy_run(models, tmp_path, changes, resume=True)
    assert "\n" not in str(caught.value)


def test_a_recipe_that_stands_in_a_run_and_is_none_is_damage(
    finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "toy")
    rewrite(tmp_path / "toy" / "recipe.json", {"recipe": {"train": {"steps": 0}}})
    with pytest.raises(
        CheckpointError, match=r"recipe\.json: \S.* and \d more; put it back"
    ) as caught:
        open_run(tmp_path / "toy")
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_evaluations_of_other_answers_are_not_compared(models: Path, tmp_path: Path) -> None:
    changes = {"evaluation.prompts": 4}
    assert (
        forked(lambda: toy_run(models, tmp_path, changes), {"PRACTICUM_FAULT": "update:3"}) == 137
    )
    path = tmp_path / "toy" / "before.json"
    saved = json.loads(path.read_text())
    student = saved["student"]
    path.write_text(json.dumps({**saved, "student": student | {"answers": student["answers"][:3]}}))
    with pytest.raises(
        CheckpointError, match=r"before\.json is damaged \(student: .*4 scores of 3 prompts\)"
    ):
        toy_run(models, tmp_path, changes, resume=True)
    fewer = student | {"answers": student["answers"][:3], "scores": student["scores"][:3]}
    path.write_text(json.dumps({**saved, "student": fewer}))
    with pytest.raises(
        CheckpointError, match=r"before\.json is damaged \(student\.answers: 3 instead of 4\)"
    ):
        toy_run(models, tmp_path, changes, resume=True)


@pytest.mark.parametrize(
    "changes",
    in_check(
        [
            {},
            {"optimizer.warmup_steps": 3, "objective.losses.0.coefficient": "linear(1, 0.5, 3)"},
            {"evaluation.every": 2, "rollout.source": "mix(student=0.5, other=replay)"},
        ],
        {},
    ),
)
def test_a_run_that_is_given_more_steps_equals_one_that_had_them_from_the_start(
    models: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    changes = {"evaluation.prompts": 4, **changes}
    if "objective.losses.0.coefficient" in changes:
        changes["objective"] = {"coefficient": changes.pop("objective.losses.0.coefficient")}
    longer = {**changes, "train.steps": 7}
    at_once = toy_run(models, tmp_path / "at_once", longer).folder
    toy_run(models, tmp_path / "extended", changes)
    page = (tmp_path / "extended" / "toy" / "report.html").read_text()
    result = toy_run(models, tmp_path / "extended", longer, resume=True)
    assert result.summary["steps"] == 7
    assert_same_run(at_once, result.folder)
    assert (result.folder / "report.html").read_text() != page


def test_more_steps_are_refused_by_name_where_the_steps_until_now_would_have_been_others(
    finished: Path, models: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "toy")
    bound = {"evaluation.prompts": 8, "train.steps": 9, "optimizer.schedule": "cosine"}
    saved = json.loads((tmp_path / "toy" / "recipe.json").read_text())
    saved["recipe"]["optimizer"]["schedule"] = "cosine"
    (tmp_path / "toy" / "recipe.json").write_text(json.dumps(saved))
    with pytest.raises(RecipeError) as caught:
        toy_run(models, tmp_path, bound, resume=True)
    assert caught.value.problems[1:] == [
        "train.steps: 4 in the run, 9 now",
        "train.steps: of 9 steps the first 4 would have been others, because of "
        "optimizer.schedule: cosine",
        'or resume the run with the change: allow_changed=["train.steps"]',
    ]


def test_each_setting_that_depends_on_the_length_of_the_run_is_named(models: Path) -> None:
    assert list_length_dependent(toy_recipe(models)) == []
    recipe = toy_recipe(
        models,
        {
            "objective": {"coefficient": "linear(1, 0)"},
            "optimizer.schedule": "linear",
            "rollout.max_staleness": 1,
        },
    )
    assert list_length_dependent(recipe) == [
        "objective.losses.0.coefficient: linear(start=1.0, end=0.0)",
        "optimizer.schedule: linear",
        "rollout.max_staleness: 1",
    ]
