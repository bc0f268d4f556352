"""`practicum eval` on rows of a file: metrics by verifier, several answers per prompt, one line per mistake."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy import make_model, said, toy_run

import practicum
from practicum.errors import DataError, RecipeError

ROWS = [{"prompt": text, "answer": text[::-1]} for text in ("ab", "abc", "bc", "bcd", "cd", "da")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model(folder / "student", seed=1, pretrain=60)
    make_model(folder / "teacher", seed=2)
    return folder


@pytest.fixture(scope="module")
def run(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on rows with column names that differ from the benchmark."""
    folder = tmp_path_factory.mktemp("runs")
    train = write(
        folder / "train.jsonl", [{"frage": r["prompt"], "soll": r["answer"]} for r in ROWS]
    )
    task = {
        "type": "jsonl",
        "path": str(train),
        "heldout": 2,
        "columns": {"prompt": "frage", "answer": "soll"},
    }
    changes = {"task": task, "train.steps": 1, "train.prompts_per_step": 2, "evaluation.prompts": 2}
    return toy_run(models, folder, changes).folder


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write(tmp_path / "test.jsonl", ROWS)


def test_each_verifier_has_a_metric_of_its_own(run: Path, rows: Path) -> None:
    summary = practicum.evaluate(run, rows=rows, verifier=["exact", "contains"])
    assert summary["prompts"] == len(ROWS) and summary["completions"] == len(ROWS)
    assert summary["accuracy[exact]"]["mean"] <= summary["accuracy[contains]"]["mean"]
    assert not {"accuracy", "reverse_kl", "calibration", "pass@1"} & summary.keys()
    alone = practicum.evaluate(run, rows=rows, verifier="contains")
    assert alone["accuracy[contains]"] == summary["accuracy[contains]"]
    # Without a name the verifier is the run's, here the default of its task.
    assert practicum.evaluate(run, rows=rows)["accuracy"] == summary["accuracy[exact]"]


def test_the_rows_are_answered_as_held_out_prompts_are(run: Path, models: Path, rows: Path) -> None:
    """Check that the same prompts get the same answers and numbers in both ways, for a run and for a model."""
    training = write(rows.parent / "train.jsonl", [{"prompt": "dabc", "answer": "cbad"}])
    changes = [
        f"task={{type: jsonl, path: {training}, heldout: {rows}}}",
        "evaluation.prompts=64",
        "rollout.max_new_tokens=5",
    ]
    expected = practicum.evaluate(run, changes)
    summary = practicum.evaluate(run, rows=rows)
    assert expected["reverse_kl"] is not None
    assert {key: expected[key] for key in summary} == summary
    student = practicum.evaluate(models / "student", ["rollout.max_new_tokens=5"], rows=rows)
    assert student["prompts"] == len(ROWS) and student.keys() == summary.keys()


def test_held_out_rows_may_have_other_columns_than_the_training_rows(run: Path, rows: Path) -> None:
    """An override of the held-out rows was refused: they lacked the training file's columns."""
    other = write(rows.parent / "other.jsonl", [{"prompt": "dac"}, {"prompt": "dca"}])
    assert practicum.evaluate(run, [f"task.heldout={other}"])["prompts"] == 2
    named = write(rows.parent / "named.jsonl", [{"frage": "ab", "soll": "ba"}])
    assert practicum.evaluate(run, rows=named)["prompts"] == 1


def test_a_run_is_measured_without_its_training_rows(
    models: Path, tmp_path: Path, rows: Path
) -> None:
    train = write(tmp_path / "train.jsonl", ROWS[:3])
    changes = {"task": {"type": "jsonl", "path": str(train), "heldout": 0}, "train.steps": 1}
    folder = toy_run(models, tmp_path, changes).folder
    train.unlink()
    assert practicum.evaluate(folder, rows=rows, verifier="exact")["prompts"] == len(ROWS)


def test_a_function_of_python_is_a_verifier(run: Path, rows: Path) -> None:
    def mentions_b(reply: str, prompt: Any) -> float:
        return float("b" in reply)

    (name,) = (
        key
        for key in practicum.evaluate(run, rows=rows, verifier=mentions_b)
        if key.startswith("accuracy[")
    )
    assert name.endswith("mentions_b]")


def test_several_answers_have_avg_and_pass_at_k(run: Path, rows: Path) -> None:
    options: dict[str, Any] = {"rows": rows, "samples": 4, "temperature": 1.0}
    summary = practicum.evaluate(run, verifier=["exact"], **options)
    assert summary["completions"] == 4 * len(ROWS)
    assert summary["avg@4[exact]"] == summary["accuracy[exact]"]
    means = [summary[f"pass@{k}[exact]"]["mean"] for k in (1, 2, 4)]
    assert means[0] == pytest.approx(summary["avg@4[exact]"]["mean"])
    assert means == sorted(means) and "pass@3[exact]" not in summary
    own = practicum.evaluate(run, samples=2, temperature=1.0)
    assert {"avg@2", "pass@1", "pass@2", "reverse_kl"} <= own.keys()


def test_verifiers_without_rows_grade_the_held_out_prompts(run: Path) -> None:
    summary = practicum.evaluate(run, verifier="contains")
    assert {"accuracy", "accuracy[contains]", "reverse_kl"} <= summary.keys()


MISTAKES: dict[str, tuple[Callable[[Path], dict[str, Any]], type[Exception], str]] = {
    "an unknown verifier": (
        lambda rows: {"rows": rows, "verifier": "mth"},
        RecipeError,
        "no verifier named 'mth'; did you mean 'math'",
    ),
    "a missing module": (
        lambda rows: {"rows": rows, "verifier": "no_such_metrics:close"},
        DataError,
        "no_such_metrics",
    ),
    "a verifier twice": (
        lambda rows: {"rows": rows, "verifier": ["exact", "exact"]},
        RecipeError,
        "'exact' is named twice; name it once",
    ),
    "a missing file": (
        lambda rows: {"rows": rows.with_name("gone.jsonl")},
        DataError,
        "there is no file .*gone.jsonl; check the path",
    ),
    "bad rows": (
        lambda rows: {"rows": write(rows, [*ROWS, {"prompt": 3}])},
        DataError,
        "row 7 is .*prompt is of type int.*; fix them, or raise task.max_rejected",
    ),
    "rows that one verifier cannot judge by": (
        lambda rows: {"rows": rows, "verifier": ["exact", "number"]},
        DataError,
        "row 1",
    ),
    "rows without answers": (
        lambda rows: {"rows": write(rows, [{"prompt": "ab"}]), "verifier": "exact"},
        DataError,
        "1 of 1 prompts have nothing that the verifier exact compares with; give rows with answer",
    ),
    "equal answers": (
        lambda rows: {"rows": rows, "samples": 4},
        RecipeError,
        "samples=4: at temperature 0 all answers to a prompt are equal; add temperature=1.0",
    ),
    "tests without rows of tests": (
        lambda rows: {"verifier": "tests"},
        DataError,
        "2 of 2 prompts have nothing that the verifier tests compares with; give rows with test_list",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy(run: Path, rows: Path, name: str) -> None:
    build, error, text = MISTAKES[name]
    with pytest.raises(error, match=text) as raised:
        practicum.evaluate(run, **build(rows))
    assert "\n" not in str(raised.value)


@pytest.mark.long
def test_the_command_prints_a_table_or_json(run: Path, models: Path, rows: Path) -> None:
    words = ("--rows", str(rows), "--verifier", "exact", "--verifier", "contains")
    status, text = said(
        rows.parent, "eval", str(run), *words, "--samples", "2", "--temperature", "1"
    )
    assert status == 0, text
    assert "accuracy[contains]  " in text and "pass@2[exact]" in text
    status, text = said(rows.parent, "eval", str(models / "student"), *words, "--json")
    assert status == 0 and "accuracy[exact]" in json.loads(text.splitlines()[-1])
    status, text = said(rows.parent, "eval", str(run), "--samples", "2")
    assert status == 2 and "add --temperature 1.0" in text
