"""The turns on the page: by number, after a mistake, and in full, with calls folded and results grey."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_pages import HOSTILE, Elements

from practicum.recipe import load_recipe
from practicum.report.run_data import RunData, read_run
from practicum.report.turns import build_turns_section
from practicum.runs import run
from practicum.statistics import compare_turns, judge_turns
from practicum.statistics.turn_statistics import TurnAgreement
from practicum.types import CallRecord, Turn

RIGHT, WRONG = TurnAgreement(0.1, 0.9, False), TurnAgreement(0.7, 0.2, True)


def test_a_turn_is_judged_by_its_own_tokens() -> None:
    turns = [
        Turn("assistant", 2, "a"),
        Turn("tool", 1, "x"),
        Turn("assistant", 1, "b", (CallRecord("echo", "answered"),)),
        Turn("assistant", 1, "c", (CallRecord("", "unreadable"),)),
        Turn("assistant", 1, "d"),
    ]
    judged = judge_turns(
        turns, [-0.1, None, -9.0, -0.2, -0.3, -4.0], [0.5, None, 9.0, 0.1, 0.2, 2.0]
    )
    assert [turn.is_wrong for turn in judged] == [False, False, True, True]
    assert [turn.reverse_kl for turn in judged] == [0.5, 0.1, 0.2, 2.0]
    assert judged[0].agreement == pytest.approx(0.9048, abs=1e-4)


def test_turns_before_and_after_a_mistake_are_told_apart() -> None:
    conversations = [[RIGHT, WRONG, WRONG, RIGHT], [RIGHT, RIGHT], [WRONG, WRONG], [WRONG]]
    assert compare_turns(conversations) == pytest.approx(
        {
            "reverse_kl_first_turn": 0.3,
            "reverse_kl_last_turn": 0.3,
            "agreement_first_turn": 2 / 3,
            "agreement_last_turn": 2 / 3,
            "first_wrong_turn": 1.5,
            "wrong_before": 2 / 5,
            "wrong_after": 2 / 3,
            "turns_after_wrong": 3,
        }
    ), "the conversation of one turn says nothing"
    assert compare_turns([[RIGHT]]) == compare_turns([]) == {}
    assert "wrong_after" not in compare_turns([[RIGHT, RIGHT]])


def test_turns_that_the_teacher_did_not_score_are_right() -> None:
    (turn,) = judge_turns([Turn("assistant", 1, "a")], [None], [None])
    assert turn == TurnAgreement(None, None, False)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    changes = [
        *("student.model.hidden_size=16", "student.model.layers=1", "student.model.heads=2"),
        *("train.steps=1", "train.prompts_per_step=4", "evaluation.prompts=0"),
        *("rollout.source=student", "rollout.max_new_tokens=24"),
    ]
    out = tmp_path_factory.mktemp("turns")
    return read_run(Path(run(load_recipe("smoke/tools", changes), out=out).folder))


def rewrite(run: RunData, turns: list[dict[str, Any]]) -> RunData:
    """Write the run with one conversation of these turns, three tokens each."""
    row = dict(run.rollouts[0]) | {"turns": turns, "source": "student"}
    count = sum(turn["tokens"] for turn in turns)
    for column in ("teacher_logprobs", "divergence"):
        row[column] = [-0.5] * count
    return replace(run, rollouts=[row | {"tokens": [0] * count}])


def test_calls_are_folded_and_results_are_grey(page: RunData) -> None:
    turns = [
        {
            "role": "assistant",
            "tokens": 3,
            "text": "[calc()]",
            "calls": [{"tool": HOSTILE, "outcome": "unknown"}],
        },
        {"role": "tool", "tokens": 3, "text": HOSTILE},
        {"role": "assistant", "tokens": 3, "text": "x" * 3000, "reward": 0.25},
    ]
    section = build_turns_section(rewrite(page, turns))
    assert section is not None
    tags = Elements(section.body).found
    assert [tag for tag, _ in tags].count("details") == 1 and "script" not in dict(tags)
    assert (
        section.body.count('class="turn reply"') == 1
        and section.body.count('class="turn own"') == 2
    )
    assert "reward 0.25" in section.body and "agreement 60.7 %" in section.body
    assert "wrong" in section.body and "x" * 2000 + "…" in section.body


def test_a_run_of_conversations_has_the_section_and_others_do_not(page: RunData) -> None:
    section = build_turns_section(page)
    assert section is not None and "The newest conversations" in section.body
    assert build_turns_section(replace(page, rollouts=[])) is None
    assert 'id="turns"' in (page.folder / "report.html").read_text()
