"""A tape of one run teaches another: the same tokens get the same scores, and other tokens get none."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorder import rollout as some_rollout
from toy import rows, toy_run

from practicum.errors import DataError, TeacherError
from practicum.objective import Sampled
from practicum.teachers.scripted import Config, ScriptedTeacher, _parse_row
from practicum.types import Prompt

CHANGES = {"objective": {"signal": "sampled", "estimator": "score_function(gamma=1)"}}


@pytest.fixture(scope="module")
def recorded(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with an objective that only needs sampled tokens."""
    return toy_run(models, tmp_path_factory.mktemp("recorded"), CHANGES).folder


def replay(models: Path, out: Path, tape: Path, **more: object) -> Path:
    return toy_run(
        models, out, {**CHANGES, "teacher": {"type": "scripted", "tape": str(tape)}, **more}
    ).folder


def test_a_replayed_run_has_the_training_curve_of_the_recorded_one(
    models: Path, recorded: Path, tmp_path: Path
) -> None:
    replayed = replay(models, tmp_path, recorded / "rollouts.jsonl")
    for one, other in zip(
        rows(recorded / "metrics.jsonl"), rows(replayed / "metrics.jsonl"), strict=True
    ):
        for name in ("loss", "length", "student_entropy", "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    tokens = [
        [row["tokens"] for row in rows(folder / "rollouts.jsonl")]
        for folder in (recorded, replayed)
    ]
    assert tokens[0] == tokens[1]


def test_a_tape_of_a_richer_objective_replays_too(
    models: Path, finished: Path, tmp_path: Path
) -> None:
    replayed = replay(models, tmp_path, finished / "rollouts.jsonl", **{"train.steps": 1})
    assert rows(replayed / "metrics.jsonl")[0]["rollouts"] == 8


def test_tokens_that_the_student_did_not_write_need_no_score(tmp_path: Path) -> None:
    row = {
        "prompt": "p",
        "tokens": [7, 8, 9],
        "loss_mask": [True, False, True],
        "teacher_logprobs": [-1.0, None, -2.0],
    }
    assert _parse_row(json.dumps(row), "row 1") == (("p", (7, 8, 9)), [-1.0, 0.0, -2.0])
    with pytest.raises(DataError, match="no teacher log-probability for each of its 3 tokens"):
        _parse_row(json.dumps(row | {"loss_mask": [True, True, True]}), "row 1")


def test_a_completion_that_was_not_recorded_is_refused_by_name(
    models: Path, recorded: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        TeacherError,
        match=r"rollouts\.jsonl has no scores for this completion of prompt '.*same seed",
    ):
        replay(
            models,
            tmp_path,
            recorded / "rollouts.jsonl",
            **{"rollout.temperature": 0.3, "optimizer.learning_rate": 1},
        )


def test_a_tape_gives_sampled_scores_only_and_the_recipe_says_so(
    models: Path, recorded: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        ValueError, match="'scripted' cannot give signal 'full'; it can give: sampled"
    ):
        replay(models, tmp_path, recorded / "rollouts.jsonl", objective={"signal": "full"})


GOOD = {"prompt": "ab", "prompt_tokens": [3], "tokens": [7, 2], "teacher_logprobs": [-1.0, -0.5]}
BAD_ROWS = {
    "not JSON": "{",
    "not an object": "[1, 2]",
    "a number": "7",
    "no tokens": json.dumps({**GOOD, "tokens": None}),
    "without scores": json.dumps(
        {key: value for key, value in GOOD.items() if key != "teacher_logprobs"}
    ),
    "too few scores": json.dumps({**GOOD, "teacher_logprobs": [-1.0]}),
    "null among the scores": json.dumps({**GOOD, "teacher_logprobs": [-1.0, None]}),
    "text among the scores": json.dumps({**GOOD, "teacher_logprobs": [-1.0, "x"]}),
    "scores are a number": json.dumps({**GOOD, "teacher_logprobs": 3}),
    "tokens are lists": json.dumps({**GOOD, "tokens": [[7], [2]]}),
    "invalid text": "\udcff\udcfe",
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_of_a_tape_is_named_by_its_number(
    models: Path, tmp_path: Path, name: str
) -> None:
    tape = tmp_path / "tape.jsonl"
    tape.write_text(
        f"{json.dumps(GOOD)}\n{BAD_ROWS[name]}\n", encoding="utf-8", errors="surrogateescape"
    )
    with pytest.raises(DataError, match=r"tape\.jsonl: row 2 "):
        replay(models, tmp_path, tape)


def test_a_tape_that_is_not_there_is_named(models: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl cannot be read.*rollouts\.jsonl of a run"):
        replay(models, tmp_path, tmp_path / "nowhere.jsonl")


def test_an_empty_tape_is_refused(models: Path, tmp_path: Path) -> None:
    (tmp_path / "tape.jsonl").write_text("")
    with pytest.raises(DataError, match=r"tape\.jsonl: no rows"):
        replay(models, tmp_path, tmp_path / "tape.jsonl")


def test_only_heldout_prompts_may_have_no_scores() -> None:
    teacher = ScriptedTeacher({("p", (7, 8)): [-1.0, -2.0]}, Path("tape.jsonl"), frozenset({"q"}))
    recorded, heldout, foreign = (
        replace(some_rollout(Prompt(name, ())), tokens=torch.tensor([7, 8])) for name in "pqr"
    )
    first, second = teacher.score([recorded, heldout], Sampled())
    assert first.logprobs is not None and first.logprobs.tolist() == [-1.0, -2.0]
    assert second.is_empty
    with pytest.raises(TeacherError, match="no scores for this completion of prompt 'r'"):
        teacher.score([recorded, foreign], Sampled())


@pytest.mark.parametrize("given", [{}, {"tape": "t", "run": {"model": "m"}}])
def test_a_tape_is_named_once(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either tape"):
        Config(**given)


def test_a_relative_tape_starts_at_the_recipes_folder(
    models: Path, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = tmp_path / "tape.jsonl"
    tape.write_bytes((recorded / "rollouts.jsonl").read_bytes())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    folder = replay(models, tmp_path / "out", Path("tape.jsonl"), base_dir=str(tmp_path))
    assert rows(folder / "metrics.jsonl")
