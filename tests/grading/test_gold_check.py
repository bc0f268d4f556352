import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tasks.golds import GOLDS, REFUSED, Gold

from practicum.errors import DataError
from practicum.grading.gold_check import PLAIN, GoldChecker
from practicum.grading.golds import list_boxes, take_final
from practicum.grading.verifiers import VERIFIERS, open_math
from practicum.ports import Task, TaskContext
from practicum.rows import describe_long_answers
from practicum.tasks.jsonl import Config, build
from practicum.types import Prompt, Rollout


@pytest.mark.parametrize("gold", GOLDS.values(), ids=GOLDS)
def test_right_replies_score_one_and_first_numbers_do_not(gold: Gold) -> None:
    verify = VERIFIERS["math"]
    assert [verify(reply, gold.answer) for reply in gold.right] == [1.0] * len(gold.right)
    assert [verify(reply, gold.answer) for reply in gold.wrong] == [0.0] * len(gold.wrong)


@pytest.mark.parametrize("gold", GOLDS.values(), ids=GOLDS)
def test_an_answer_that_is_accepted_scores_one_in_a_box(gold: Gold) -> None:
    checker = GoldChecker("math", "require", "rows.jsonl")
    assert checker.find_problem(gold.answer) is None
    boxes = list_boxes(take_final(gold.answer))
    assert 1.0 in [VERIFIERS["math"](box, gold.answer) for box in boxes]


@pytest.mark.parametrize("answer", REFUSED.values(), ids=REFUSED)
def test_an_answer_that_no_reply_can_match_is_refused(answer: str) -> None:
    problem = GoldChecker("math", "require", "rows.jsonl").find_problem(answer)
    assert (
        problem is not None
        and "write only the final answer as LaTeX, or write it after ####" in problem
    )


@settings(max_examples=40)
@given(st.from_regex(PLAIN, fullmatch=True))
def test_plain_numbers_need_no_check(number: str) -> None:
    assert open_math("require").ask({"answer": number}, 5.0) is None


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Task]:
    def read_rows(*answers: str, **settings: Any) -> Task:
        lines = [
            json.dumps({"prompt": f"question {n}", "answer": a}) for n, a in enumerate(answers)
        ]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
        config = Config.model_validate({"path": "rows.jsonl", "heldout": 0, **settings})
        return build(config, TaskContext(0, tmp_path, tmp_path / "rejected.jsonl"))

    return read_rows


def test_a_refused_answer_is_named_with_its_file_and_row(read: Callable[..., Task]) -> None:
    good = [gold.answer for gold in GOLDS.values()]
    with pytest.raises(DataError) as caught:
        read(*good, REFUSED["text around a unit"], verifier="math")
    message = str(caught.value)
    assert (
        f"rows.jsonl: 1 of {len(good) + 1} rows cannot be used; row {len(good) + 1} is" in message
    )
    assert "answer '20 $cm^{2}$' scores 0 for itself in \\boxed{}" in message
    assert len(read(*good, verifier="math").train_prompts()) == len(good)


@pytest.mark.parametrize(
    "answer",
    ["3/4", "\\frac{1}{2}", "(3, 4)", "12:30", "5 apples", "2^{10}", "7\u00bd", "x = 3", "two"],
)
@pytest.mark.parametrize("verifier", ["number", "first_line"])
def test_an_answer_that_is_not_one_number_is_refused(
    read: Callable[..., Task], answer: str, verifier: str
) -> None:
    with pytest.raises(
        DataError, match=r"is not one number.*or write it after ####, or set verifier: math"
    ):
        read("3", answer, verifier=verifier)


@pytest.mark.parametrize(
    "answer",
    [
        "3",
        "-3",
        "+3",
        "1,000.50",
        "$18",
        "$18$",
        "50%",
        "3.",
        "1e5",
        "worked: 2 + 1\n#### 3",
        "\\$5",
    ],
)
def test_an_answer_that_is_one_number_is_read(read: Callable[..., Task], answer: str) -> None:
    task = read(answer, verifier="number")
    (prompt,) = task.train_prompts()
    final = answer.rpartition("####")[2].strip(" $\\%")
    assert task.reward(Rollout.from_text(prompt, f"So it is {final}.")) == 1.0
    assert task.reward(Rollout.from_text(prompt, "So it is 77.")) == 0.0


def test_exact_comparison_of_worked_solutions_is_noted(
    read: Callable[..., Task], notes: list[str]
) -> None:
    read(*(f"{n}+1=<<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}" for n in range(12)))
    assert "12 of 12 answers hold ####, and the verifier 'exact' compares" in notes[-1]
    read("a\nb", "c")
    assert "1 of 2 answers span several lines" in notes[-1]
    count = len(notes)
    read("a", "c\n")
    read("a\nb", "c", verifier="contains")
    assert len(notes) == count


def test_units_that_math_verify_does_not_know_are_noted_once(
    read: Callable[..., Task], notes: list[str]
) -> None:
    read("5 cm", "12 hours", "5\\text{ dollars}", "3 ab", "x = 3", verifier="math")
    assert not any("as a unit" in note for note in notes)
    task = read("7", "5 dollars", "so\n#### 10 km/h", verifier="math")
    (note,) = [note for note in notes if "as a unit" in note]
    assert note.endswith(
        "rows.jsonl: 2 answers end in letters that math-verify does not know as a unit; the first is "
        "'5 dollars' in row 2, for which a reply of 5 scores 0; if it is a unit, write 5 or "
        "5\\text{ dollars}"
    )
    dollars = task.train_prompts()[1]
    assert task.reward(Rollout.from_text(dollars, "\\boxed{5}")) == 0.0
    (advised,) = read("5\\text{ dollars}", verifier="math").train_prompts()
    for reply in ("\\boxed{5}", "\\boxed{5\\text{ dollars}}"):
        assert task.reward(Rollout.from_text(advised, reply)) == 1.0


def test_answers_longer_than_a_reply_are_noted() -> None:
    prompts = [Prompt(str(n), (), answer="x" * n) for n in range(1, 9)]
    config = Config(path=Path("rows.jsonl"))
    note = describe_long_answers(config, prompts, str.encode, 6)
    assert note is not None and note.startswith(
        "2 of 8 answers have more tokens than rollout.max_new_tokens, 6,"
    )
    assert describe_long_answers(config, prompts, str.encode, 8) is None
    other = Config(path=Path("rows.jsonl"), verifier="contains")
    assert describe_long_answers(other, prompts, str.encode, 6) is None


def test_a_long_check_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, notes: list[str]) -> None:
    monkeypatch.setattr("practicum.grading.gold_check.PROGRESS_SECONDS", -math.inf)
    checker = GoldChecker("math", "require", "rows.jsonl")
    assert checker.find_problem("\\sqrt{19}") is None
    assert checker.find_problem("19") is None
    assert checker.find_problem("\\sqrt{21}") is None
    assert notes == [
        "rows.jsonl: 1 answers compared with the verifier so far",
        "rows.jsonl: 3 answers compared with the verifier so far",
    ]


@pytest.mark.parametrize(
    ("verifier", "answer", "right", "wrong"),
    [
        ("exact", "42", "42", "41"),
        ("contains", "42", "It is 42.", "It is 41."),
        ("number", "42", "It is 42.", "It is 41."),
        ("first_line", "42", "42\nConfidence: 0.5", "41"),
        ("math", "42", "\\boxed{42}", "\\boxed{41}"),
    ],
)
def test_every_verifier_reads_the_answer_after_the_thoughts(
    read: Callable[..., Task], verifier: str, answer: str, right: str, wrong: str
) -> None:
    task = read(answer, verifier=verifier)
    (prompt,) = task.train_prompts()
    for text, score in (
        (f"<think>{wrong}</think>\n{right}", 1.0),
        (f"<think>{right}</think>\n{wrong}", 0.0),
        (f"<think>{right}", 0.0),
        (f"{wrong}</think>\n\n{right}", 1.0),
    ):
        assert task.reward(Rollout.from_text(prompt, text)) == score
    inside = replace(Rollout.from_text(prompt, right), opens_thoughts=True)
    assert task.reward(inside) == 0.0
