"""Signals, full disks, two runs at once, exploding numbers, models that do not belong together."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
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
    environment,
    exit_status,
    forked,
    interrupt_twice,
    lines,
    make_model,
    rows,
    start_fork,
    toy_run,
    wait_in_first_step,
    when,
    write_recipe,
)

from practicum.errors import (
    DataError,
    ModelError,
    NumericError,
    RecipeError,
    ResourceError,
    VocabularyError,
)
from practicum.runs import open_student

pytestmark = pytest.mark.long

SLOW_STEPS = {
    "train.steps": 400,
    "train.checkpoint_every": 40,
    "train.prompts_per_step": 2,
    "rollout.max_new_tokens": 2,
}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_after_the_step_and_the_resume_is_exact(
    models: Path, tmp_path: Path, number: int, code: int
) -> None:
    changes = {**SLOW_STEPS, "train.steps": 30, "train.checkpoint_every": None, "monitors": "off"}
    output = tmp_path / "output"
    pid = start_fork(lambda: toy_run(models, tmp_path / "cut", changes), output=output)
    when(lambda: lines(tmp_path / "cut" / "toy" / "metrics.jsonl") >= 3)
    os.kill(pid, number)
    assert exit_status(os.waitpid(pid, 0)[1]) == code
    text = output.read_text()
    assert f"stopped by {signal.Signals(number).name} after step" in text and "resume=True" in text
    done = lines(tmp_path / "cut" / "toy" / "metrics.jsonl")
    assert (tmp_path / "cut" / "toy" / "checkpoints" / f"step-{done}").is_dir()
    resumed = toy_run(models, tmp_path / "cut", changes, resume=True).folder
    assert_same_run(toy_run(models, tmp_path / "whole", changes).folder, resumed)


def test_a_second_interrupt_ends_the_run_at_once_and_breaks_nothing(
    models: Path, tmp_path: Path
) -> None:
    with wait_in_first_step():
        pid = start_fork(lambda: toy_run(models, tmp_path), output=tmp_path / "output")
    assert interrupt_twice(pid, tmp_path / "output") == 130
    assert "stopped at once" in (tmp_path / "output").read_text()
    assert lines(tmp_path / "toy" / "metrics.jsonl") == 0, "the first step was still going on"


def test_the_command_line_answers_a_signal_with_one_line_and_its_code(
    models: Path, tmp_path: Path
) -> None:
    recipe = write_recipe(models, tmp_path / "r.yaml", SLOW_STEPS)
    pid = start_fork(
        command("run", str(recipe), "--out", str(tmp_path)), output=tmp_path / "output"
    )
    when(lambda: lines(tmp_path / "toy" / "metrics.jsonl") >= 2)
    os.kill(pid, signal.SIGTERM)
    assert exit_status(os.waitpid(pid, 0)[1]) == 143
    last = (tmp_path / "output").read_text().splitlines()[-1]
    assert (
        last.startswith("error: stopped by SIGTERM")
        and "Traceback" not in (tmp_path / "output").read_text()
    )


def test_handlers_of_signals_are_given_back(models: Path, tmp_path: Path) -> None:
    earlier = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    toy_run(models, tmp_path, {"train.steps": 1})
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == earlier


def test_a_checkpoint_that_no_longer_fits_says_what_it_needs_and_the_run_can_go_on(
    models: Path, tmp_path: Path
) -> None:
    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        toy_run(models, tmp_path / "cut")

    assert forked(limited, output=tmp_path / "output") == 8
    text = (tmp_path / "output").read_text()
    assert "checkpoint of step 2 needs" in text and "MiB free" in text and "ulimit -f" in text
    resumed = toy_run(models, tmp_path / "cut", resume=True).folder
    assert not list(resumed.rglob("*.tmp*"))
    assert_same_run(toy_run(models, tmp_path / "whole").folder, resumed)


def test_a_disk_without_room_for_a_checkpoint_is_named_before_anything_is_computed(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(
        ResourceError,
        match=r"a checkpoint of this run needs 0\.\d MiB, 0\.1 MiB free in .*toy; free space, or",
    ):
        toy_run(models, tmp_path / "cut", {"evaluation.prompts": 4})
    assert not (tmp_path / "cut" / "toy" / "before.json").exists() and not lines(
        tmp_path / "cut" / "toy" / "metrics.jsonl"
    )
    monkeypatch.undo()
    resumed = toy_run(models, tmp_path / "cut", {"evaluation.prompts": 4}, resume=True).folder
    assert_same_run(toy_run(models, tmp_path / "whole", {"evaluation.prompts": 4}).folder, resumed)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    toy_run(
        models, tmp_path / "cut", {"evaluation.prompts": 4}, resume=True
    )  # finished: nothing more is written


@pytest.mark.slow
def test_a_full_disk_is_heard_of_before_the_run_trains(models: Path, tmp_path: Path) -> None:
    probe = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("this machine gives no mount namespaces")
    disk = tmp_path / "disk"
    disk.mkdir()
    recipe = write_recipe(models, tmp_path / "r.yaml")
    script = f"mount -t tmpfs -o size=128k none {disk} && exec {sys.executable} -m practicum run {recipe} --out {disk}"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "mount:" in done.stderr:
        pytest.skip("this machine mounts no tmpfs")
    assert (
        done.returncode == 8
        and "a checkpoint of this run needs" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_a_folder_that_cannot_be_made_is_named_before_anything_is_computed(
    models: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", Path("/proc/nowhere")):
        with pytest.raises((RecipeError, ResourceError), match=str(out)):
            toy_run(models, out)


def test_a_folder_deleted_while_running_is_named_at_the_next_save(
    models: Path, tmp_path: Path
) -> None:
    pid = start_fork(lambda: toy_run(models, tmp_path, SLOW_STEPS), output=tmp_path / "output")
    when(lambda: lines(tmp_path / "toy" / "metrics.jsonl") >= 2)
    shutil.rmtree(tmp_path / "toy")
    assert exit_status(os.waitpid(pid, 0)[1]) == 8
    text = (tmp_path / "output").read_text()
    assert str(tmp_path / "toy") in text and "Traceback" not in text


def test_of_two_runs_of_one_name_exactly_one_proceeds(models: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / "one", tmp_path / "two"]
    pids = [
        start_fork(lambda: toy_run(models, tmp_path / "runs"), output=output) for output in outputs
    ]
    codes = [exit_status(os.waitpid(pid, 0)[1]) for pid in pids]
    assert sorted(codes)[0] == 0 and sorted(codes)[1] in (2, 8), [
        output.read_text() for output in outputs
    ]
    assert [row["step"] for row in rows(tmp_path / "runs" / "toy" / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
    ]


def test_of_two_resumes_exactly_one_proceeds(models: Path, tmp_path: Path) -> None:
    assert (
        forked(lambda: toy_run(models, tmp_path, SLOW_STEPS), {"PRACTICUM_FAULT": "update:1"})
        == 137
    )
    pid = start_fork(lambda: toy_run(models, tmp_path, SLOW_STEPS, resume=True))
    when(lambda: lines(tmp_path / "toy" / "metrics.jsonl") >= 2)
    with pytest.raises(ResourceError, match=r"another process|in use|locked|already"):
        toy_run(models, tmp_path, SLOW_STEPS, resume=True)
    os.kill(pid, signal.SIGTERM)
    assert exit_status(os.waitpid(pid, 0)[1]) == 143


def test_an_exploding_run_ends_and_its_checkpoints_hold_numbers(
    models: Path, tmp_path: Path
) -> None:
    changes = {"optimizer.weight_decay": 1e30, "train.steps": 12, "train.checkpoint_every": 1}
    with pytest.raises((NumericError, ModelError)):
        toy_run(models, tmp_path, changes)
    for path in (tmp_path / "toy").rglob("student.safetensors"):
        assert all(torch.isfinite(value).all() for value in load_file(path).values()), path


def test_a_large_learning_rate_ends_in_a_number_or_in_a_documented_error(
    models: Path, tmp_path: Path
) -> None:
    changes = {"optimizer.learning_rate": 9.9, "train.steps": 8}
    status = forked(lambda: toy_run(models, tmp_path, changes), output=tmp_path / "output")
    assert status in (0, 7), (tmp_path / "output").read_text()
    if status == 0:
        assert all(value is not None for value in curve(tmp_path / "toy", "reverse_kl"))


TASK = {"type": "jsonl", "path": "train.jsonl", "heldout": 0, "verifier": "exact"}


def jsonl(tmp_path: Path, prompts: list[str]) -> dict[str, Any]:
    """Return changes for a recipe on a file with these prompts."""
    text = "".join(
        json.dumps({"id": f"{number}", "prompt": prompt, "answer": "a"}) + "\n"
        for number, prompt in enumerate(prompts)
    )
    (tmp_path / "train.jsonl").write_text(text)
    return {"task": TASK, "base_dir": str(tmp_path), "train.steps": 2}


def test_no_prompts_are_a_data_error(models: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl"):
        toy_run(models, tmp_path, jsonl(tmp_path, []))


def test_one_prompt_fills_a_whole_step(models: Path, tmp_path: Path) -> None:
    folder = toy_run(models, tmp_path, jsonl(tmp_path, ["ab"])).folder
    first = [row for row in rows(folder / "rollouts.jsonl") if row["step"] == 1]
    assert [(row["prompt"], row["sample"]) for row in first] == [
        ("0", number) for number in range(8)
    ]
    assert len({tuple(row["tokens"]) for row in first}) > 1, (
        "each completion has a separate random stream"
    )


def test_prompts_at_the_limit_stay_and_one_past_it_is_left_out_and_counted(
    models: Path, tmp_path: Path
) -> None:
    console = RecordingConsole()
    changes = {
        **jsonl(tmp_path, ["ab", "abc", "abcd"]),
        "prompt_tokens": 5,
    }  # <user>, three letters, <assistant>
    folder = toy_run(models, tmp_path, changes, console=console).folder
    assert {row["prompt"] for row in rows(folder / "rollouts.jsonl")} == {"0", "1"}
    assert any(text.startswith("1 of 3 prompts left out") for text in console.events), (
        console.events
    )


@pytest.mark.parametrize(
    "changes",
    [{"prompt_tokens": 2}, {"rollout.max_new_tokens": 512}, {"rollout.max_new_tokens": 600}],
)
def test_no_room_for_any_prompt_is_said_before_the_first_step(
    models: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=r"all 48 training prompts are too long.*context of 512"):
        toy_run(models, tmp_path, changes)
    assert not (tmp_path / "toy" / "metrics.jsonl").exists()


def test_an_answer_may_fill_the_context_to_its_last_token(models: Path, tmp_path: Path) -> None:
    changes = {"rollout.max_new_tokens": 512 - 5, "train.steps": 1, "train.prompts_per_step": 2}
    assert rows(toy_run(models, tmp_path, changes).folder / "metrics.jsonl")[0]["length"] <= 507


def test_padding_of_the_vocabulary_changes_no_number(models: Path, tmp_path: Path) -> None:
    padded = tmp_path / "padded"
    shutil.copytree(models / "teacher", padded)
    weights = load_file(padded / "model.safetensors")
    (name,) = [name for name in weights if "embed_tokens" in name]
    real = weights[name]
    weights[name] = torch.cat([real, torch.full((13, real.shape[1]), 3.0)])
    save_file(weights, padded / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((padded / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps({**config, "vocab_size": len(weights[name])}))
    plain = toy_run(models, tmp_path / "one").folder
    other = toy_run(models, tmp_path / "two", {"teacher.model": str(padded)}).folder
    assert (plain / "rollouts.jsonl").read_bytes() == (other / "rollouts.jsonl").read_bytes()
    assert curve(plain, "reverse_kl") == pytest.approx(curve(other, "reverse_kl"), rel=1e-6)


def test_a_student_with_a_padded_vocabulary_learns_and_never_says_padding(
    models: Path, tmp_path: Path
) -> None:
    student = make_model(tmp_path / "student", seed=1, padded_vocabulary=64)
    changes = {"student.model": str(student), "train.steps": 8}
    folder = toy_run(models, tmp_path, changes).folder
    assert max(token for row in rows(folder / "rollouts.jsonl") for token in row["tokens"]) < 11


def test_a_permuted_vocabulary_of_the_same_size_is_refused_with_its_first_tokens(
    models: Path, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", alphabet="dcba", seed=1)
    with pytest.raises(
        VocabularyError, match=r"permuted.*id 7 is 'a' for the student and 'd' for the teacher"
    ):
        toy_run(models, tmp_path, {"teacher.model": str(other)})


def test_another_vocabulary_is_refused_with_both_sizes(models: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", alphabet="hgfedcba", seed=1)
    with pytest.raises(VocabularyError, match=r"student 11 tokens, teacher 15"):
        toy_run(models, tmp_path, {"teacher.model": str(other)})


def broken(models: Path, tmp_path: Path, how: str) -> Path:
    """Copy the teacher with one fault."""
    folder = tmp_path / "broken"
    shutil.copytree(models / "teacher", folder)
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if how == "a weight is missing":
        del weights[next(name for name in weights if "layers.0" in name)]
    elif how == "a weight has another shape":
        weights = {
            name: value[:, :-2].contiguous() if "q_proj" in name else value
            for name, value in weights.items()
        }
    elif how == "a weight is not a number":
        next(value for name, value in weights.items() if "q_proj" in name)[0, 0] = torch.nan
    elif how == "config for a wider model":
        config["hidden_size"] = 48
    elif how == "config is not JSON":
        (folder / "config.json").write_text("{")
    if how != "config is not JSON":
        (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if how == "no tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    elif how == "no chat template":
        (folder / "chat_template.jinja").unlink()
    elif how == "no weights":
        (folder / "model.safetensors").unlink()
    elif how == "half the weights file":
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    return folder


BROKEN = {
    "a weight is missing": "weights are missing",
    "a weight has another shape": "another shape|could not be loaded",
    "a weight is not a number": "not finite|NaN",
    "config for a wider model": "another shape|could not be loaded",
    "config is not JSON": "not JSON",
    "no tokenizer": "tokenizer",
    "no chat template": "no chat template",
    "no weights": "no weights",
    "half the weights file": "could not be loaded",
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("role", ["student", "teacher"])
def test_a_broken_model_folder_is_named_before_the_first_step(
    models: Path, tmp_path: Path, how: str, role: str
) -> None:
    with pytest.raises(ModelError, match=BROKEN[how]) as caught:
        toy_run(models, tmp_path, {f"{role}.model": str(broken(models, tmp_path, how))})
    assert "broken" in str(caught.value)
    assert lines(tmp_path / "toy" / "metrics.jsonl") == 0


def test_models_that_end_answers_differently_are_named(models: Path, tmp_path: Path) -> None:
    recipe = write_recipe(models, tmp_path / "r.yaml", {"teacher.stop": ["a"], "train.steps": 1})
    assert (
        forked(command("run", str(recipe), "--out", str(tmp_path)), output=tmp_path / "output") == 0
    )
    assert (
        "the student stops at </s> (2), the teacher at </s> (2), a (7)"
        in (tmp_path / "output").read_text()
    )


def test_adapters_without_rank_are_refused_with_the_recipe(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"student\.lora\.rank: .*\(given: 0\)"):
        toy_run(models, tmp_path, {"student.lora": {"rank": 0}})


def test_more_trainable_layers_than_there_are_is_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"trainable_layers is 9, but .*student has 1 layers"):
        toy_run(models, tmp_path, {"student.trainable_layers": 9})


def test_a_checkpoint_of_another_model_is_not_put_into_the_student(
    finished: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "toy"
    shutil.copytree(finished, copy)
    other = make_model(tmp_path / "other", seed=1, hidden_size=16)
    saved = json.loads((copy / "recipe.json").read_text())
    saved["recipe"]["student"]["model"] = str(other)
    (copy / "recipe.json").write_text(json.dumps(saved))
    with pytest.raises((ModelError, RuntimeError), match=r"student|size"):
        open_student(copy)


def test_a_run_interrupted_in_a_thread_of_a_program_leaves_signals_alone(
    models: Path, tmp_path: Path
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(lambda: toy_run(models, tmp_path, {"train.steps": 1})).result()
    assert result.folder.is_dir()
