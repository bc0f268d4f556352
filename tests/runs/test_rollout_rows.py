"""The rollouts of a run as rows: tokens, log-probabilities, rewards and top tokens."""

import math
from pathlib import Path

import pandas
import pytest

import practicum
from practicum.errors import CheckpointError, DataError, RecipeError
from practicum.runs import RunResult


@pytest.fixture(scope="module")
def result(finished: Path) -> RunResult:
    return practicum.load_run(finished)


def test_a_row_has_tokens_texts_and_the_numbers_of_each(result: RunResult) -> None:
    rows = result.rollouts(progress=False)
    assert len(rows) == result.summary["rollouts"]
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    for row in rows:
        columns = ("token_texts", "mask", "authors", "student_logprobs", "teacher_logprobs")
        assert {len(row[name]) for name in columns} == {len(row["tokens"])}
        assert "".join(row["token_texts"]).startswith(row["text"])
        assert set(row["authors"]) == {"student"}
        assert all(number <= 0 for number in row["student_logprobs"])
    table = pandas.DataFrame(rows)
    assert table["reward"].between(0, 1).all() and set(table["source"]) == {"student"}


def test_a_step_and_a_limit_choose_rows(result: RunResult) -> None:
    rows = result.rollouts(step=2, progress=False)
    assert {row["step"] for row in rows} == {2}
    assert result.rollouts(step=2, limit=3, progress=False) == rows[:3]
    with pytest.raises(DataError, match="no rollouts of step 9; leave step out for all steps"):
        result.rollouts(step=9, progress=False)


@pytest.mark.parametrize("arguments", [{"top": -1}, {"limit": 0}, {"step": "2"}, {"top": True}])
def test_other_numbers_are_refused(result: RunResult, arguments: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match=r"give a whole number from [01] on"):
        result.rollouts(**arguments, progress=False)


def test_top_tokens_are_those_of_both_models(
    result: RunResult, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    monkeypatch.setattr("practicum.runs.rollout_rows.MOST_ROWS", 5)
    rows = result.rollouts(top=5, progress=False)
    assert len(rows) == 5 and "the first 5 rollouts; set limit or step for others" in notes
    for row in rows:
        assert row["top_step"] == 4
        for side in ("student_top", "teacher_top"):
            assert len(row[side]) == len(row["tokens"])
            for position in row[side]:
                logprobs = [logprob for _, logprob in position]
                assert len(position) == 5 and logprobs == sorted(logprobs, reverse=True)
                assert sum(map(math.exp, logprobs)) <= 1 + 1e-5
        # The teacher has not changed since the step, so its numbers equal the run's.
        for text, given, top in zip(
            row["token_texts"], row["teacher_logprobs"], row["teacher_top"], strict=True
        ):
            assert text not in dict(top) or dict(top)[text] == pytest.approx(given, abs=1e-4)


def test_a_folder_without_a_finished_run_says_so(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such"):
        practicum.load_run(tmp_path / "none")
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "recipe.json").write_text((finished / "recipe.json").read_text())
    with pytest.raises(CheckpointError, match=r"not finished, .*resume=True"):
        practicum.load_run(unfinished)
