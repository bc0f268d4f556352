"""A teacher's answers as rows: their content, the resume after an interruption, and training on them."""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stub_server import FolderModel, Stub
from toy import make_model, rows, toy_recipe, toy_run, write_recipe

from practicum.cli.answers import build_command
from practicum.errors import CapabilityError, DataError, Interrupted, VocabularyError
from practicum.models.config import ScorerConfig
from practicum.recipe import Recipe
from practicum.runs import answer_file
from practicum.runs.answer_file import write_answers
from practicum.runs.console import SilentConsole
from practicum.runs.opening import load_model
from practicum.types import Message, SampleRequest, SamplingParams


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1)
    make_model(folder / "teacher", seed=2, pretrain=60)
    make_model(folder / "other", seed=3, alphabet="zyxabcd", pretrain=60)
    return folder


def other(models: Path, changes: dict[str, Any] | None = None) -> Recipe:
    """Return a recipe in which teacher and student have different vocabularies."""
    teacher = {"type": "model", "model": str(models / "other")}
    return toy_recipe(models, {"teacher": teacher, **(changes or {})})


def answer_greedily(folder: Path, written: list[dict[str, Any]]) -> list[str]:
    """Return the answers of the model in a folder to the prompts of some rows, asked directly."""
    model = load_model(ScorerConfig(model=str(folder)))
    requests = [
        SampleRequest(model.renderer.render([Message("user", row["prompt"])]), 0) for row in written
    ]
    samples = model.client.sample(
        requests, SamplingParams(5, 0.0, stop_ids=model.renderer.stop_ids)
    )
    return [model.renderer.decode(sample.tokens.tolist()) for sample in samples]


def test_rows_hold_the_question_and_the_answer_of_a_teacher_of_another_vocabulary(
    models: Path, tmp_path: Path
) -> None:
    recipe = other(models)
    result = write_answers(recipe, tmp_path / "a.jsonl", temperature=0.0)
    written = rows(tmp_path / "a.jsonl")
    assert result.answers == len(written) > 8
    assert result.cut == sum(row["finish_reason"] == "length" for row in written)
    assert set(written[0]) == {"id", "prompt", "answer", "response", "finish_reason"}
    assert [row["response"] for row in written] == answer_greedily(models / "other", written)
    assert len({row["response"] for row in written}) > 1


def test_answers_depend_on_the_seed_and_on_no_earlier_file(models: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_answers(other(models, {"seed": seed}), tmp_path / name, temperature=1.5)
    first, again, third = ((tmp_path / name).read_bytes() for name in "abc")
    assert first == again != third


class Interruption(SilentConsole):
    """A console at which the user presses Ctrl-C after the first chunk."""

    def step(self, *_: object) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("torn", [0, 7])
def test_an_interrupted_file_goes_on_with_the_bytes_of_a_whole_one(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: int
) -> None:
    monkeypatch.setattr(answer_file, "CHUNK", 10)
    recipe, path = other(models), tmp_path / "a.jsonl"
    write_answers(recipe, tmp_path / "whole", n=2, temperature=1.0)
    with pytest.raises(Interrupted, match="the same command resumes") as stop:
        write_answers(recipe, path, n=2, temperature=1.0, console=Interruption())
    assert stop.value.exit_code == 130
    assert len(rows(path)) == 10
    os.truncate(path, path.stat().st_size - torn)
    write_answers(recipe, path, n=2, temperature=1.0)
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    assert [row["id"][-2:] for row in rows(path)[:3]] == ["#0", "#1", "#0"]


def test_a_file_of_other_settings_or_of_another_writer_is_left_alone(
    models: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    write_answers(other(models), path)
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"other settings \(n, temperature\); undo"):
        write_answers(other(models), path, n=2, temperature=0.5)
    with pytest.raises(DataError, match=r"other settings \(teacher, models\)"):
        write_answers(toy_recipe(models), path)
    assert path.read_bytes() == before
    write_answers(other(models), path)
    assert path.read_bytes() == before
    (tmp_path / "mine.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="was not begun by this command"):
        write_answers(other(models), tmp_path / "mine.jsonl")


@pytest.mark.parametrize(
    "teacher",
    ["none", {"type": "privileged", "teacher": "self", "reference": "{attempt}"}],
    ids=["none", "after an attempt"],
)
def test_teachers_that_write_nothing_are_refused(
    models: Path, tmp_path: Path, teacher: Any
) -> None:
    recipe = toy_recipe(
        models,
        {
            "teacher": teacher,
            "objective": {"signal": "text", "divergence": "ce"}
            if teacher == "none"
            else {"signal": "full"},
            "rollout.source": "dataset" if teacher == "none" else "student",
        },
    )
    with pytest.raises(CapabilityError, match=r"writes no answers before it has seen one; take"):
        write_answers(recipe, tmp_path / "a.jsonl")
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize(
    "teacher",
    [
        "self",
        {"type": "privileged", "teacher": "self", "system": "abc"},
        {"type": "privileged", "teacher": {"type": "model", "model": "other"}, "system": "abc"},
    ],
    ids=["self", "privileged self", "privileged model"],
)
def test_every_teacher_that_writes_can_answer(
    models: Path, tmp_path: Path, teacher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    write_answers(toy_recipe(models, {"teacher": teacher}), tmp_path / "a.jsonl", n=1)
    assert rows(tmp_path / "a.jsonl")


def test_a_server_of_another_vocabulary_answers(models: Path, tmp_path: Path) -> None:
    with Stub(FolderModel(models / "other")) as stub:
        teacher = {"type": "openai_api", "url": stub.url, "tokenizer": str(models / "other")}
        changes = {"teacher": teacher, "objective": {"signal": "sampled"}}
        write_answers(toy_recipe(models, changes), tmp_path / "a.jsonl", temperature=0.0)
    written = rows(tmp_path / "a.jsonl")
    assert [row["response"] for row in written] == answer_greedily(models / "other", written)


def test_teachers_of_several_vocabularies_come_singly(models: Path, tmp_path: Path) -> None:
    members = {
        name: {"type": "model", "model": str(models / name)} for name in ("other", "teacher")
    }
    teacher = {"type": "route", "key": "domain", "teachers": members}
    with pytest.raises(VocabularyError):
        write_answers(toy_recipe(models, {"teacher": teacher}), tmp_path / "a.jsonl")


def test_a_pair_of_two_vocabularies_is_told_of_the_two_commands(
    models: Path, tmp_path: Path
) -> None:
    with pytest.raises(VocabularyError, match=r"practicum answers RECIPE --out .*source=dataset"):
        toy_run(models, tmp_path, {"teacher.model": str(models / "other")})


@pytest.mark.long
def test_a_student_learns_from_another_family_in_two_commands(models: Path, tmp_path: Path) -> None:
    changes = {"teacher.model": str(models / "other"), "train.steps": 3, "evaluation.prompts": 4}
    recipe = write_recipe(models, tmp_path / "pair.yaml", changes)

    def call(*words: str) -> str:
        command = [sys.executable, "-m", "practicum", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    output = call("answers", str(recipe), "--out", "answers.jsonl", "--n", "2")
    (line,) = [line for line in output.splitlines() if line.startswith("to learn from them: ")]
    command = shlex.split(line.removeprefix("to learn from them: "))
    path = tmp_path / "answers.jsonl"
    assert command == shlex.split(build_command(str(recipe), [], other(models), path))
    assert command[:2] == ["practicum", "run"]
    assert "sampled" not in call(*command[1:])
    metrics = rows(tmp_path / "runs" / "toy" / "metrics.jsonl")
    assert [row["from_dataset"] for row in metrics] == [1.0, 1.0, 1.0]
    # The student has no token for some letters of the teacher's, and writes <unk> for them.
    renderer = load_model(ScorerConfig(model=str(models / "student"))).renderer
    texts = {
        renderer.decode(
            renderer.encode_answer([Message("user", row["prompt"])], row["response"], 5)
        )
        for row in rows(path)
    }
    assert {row["text"] for row in rows(tmp_path / "runs" / "toy" / "rollouts.jsonl")} <= texts
