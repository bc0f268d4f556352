"""Programs as answers: which programs run, which are right, and that only arithmetic runs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from practicum.grading.run_programs import compute_result, count_running_lines, respond
from practicum.ports import TaskContext
from practicum.tasks.programs import (
    Config,
    Programs,
    build,
    list_other_questions,
    write_program,
)
from practicum.types import Rollout


def task(**settings: object) -> Programs:
    made = build(Config.model_validate(settings), TaskContext(0, Path()))
    assert isinstance(made, Programs)
    return made


@given(
    st.lists(st.tuples(st.sampled_from("+-*"), st.integers(0, 9)), max_size=5), st.integers(0, 9)
)
def test_the_worked_answer_has_the_value_from_left_to_right(
    rest: list[tuple[str, int]], first: int
) -> None:
    value = first
    for sign, digit in rest:
        value = {"+": value + digit, "-": value - digit, "*": value * digit}[sign]
    program = write_program(f"{first}" + "".join(f"{sign}{digit}" for sign, digit in rest))
    assert compute_result(program) == value
    assert count_running_lines(program.split("\n")) == len(rest) + 1


@given(st.lists(st.sampled_from("+-*"), min_size=1, max_size=4), st.integers(0, 10**5 - 1))
def test_parts_are_the_beginnings_and_the_rephrased_expression_has_the_same_value(
    signs: list[str], digits: int
) -> None:
    numbers = f"{digits:05d}"
    text = numbers[0] + "".join(map("".join, zip(signs, numbers[1:], strict=False)))
    fields = list_other_questions(text)
    parts = fields.get("parts", "").splitlines()
    assert [len(part) for part in parts] == list(range(3, len(text), 2))
    assert all(text.startswith(part) for part in parts)
    swaps = signs[0] != "-" and numbers[0] != numbers[1]
    assert ("rephrased" in fields) == swaps
    if swaps:
        assert fields["rephrased"] != text
        first, second = (write_program(form) for form in (text, fields["rephrased"]))
        assert compute_result(first) == compute_result(second)


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (["a=3", "a+=4\n", " b=(a-1)*-2"], 3),
        (["a=3", "b+=1", "a=4"], 1),  # b is not known
        (["a=3", "a=", "a=4"], 1),
        (["a=3", ""], 1),
        (["a=3;b=4"], 0),
        (["a,b=3,4"], 0),
        (["a=b=3"], 0),
        (["a=1/0"], 0),
        (["a=9**9**9"], 0),
        (["a=True"], 0),
        (["a=__debug__"], 0),
        (["a=__builtins__"], 0),
        (["a='x'"], 0),
        (["a=0.5"], 0),
        (["a=999999999", "a*=2"], 1),
        (["a=1000000001"], 0),
        (["a=(1).__class__"], 0),
        (["a=__import__('os')"], 0),
        (["a=[1]*9"], 0),
        (["a=lambda:1"], 0),
        (["import os"], 0),
        (["a=" + "(" * 500], 0),
        (["a=" + "1+" * 60 + "1"], 0),
        (["a=1\x00"], 0),
    ],
)
def test_only_lines_of_arithmetic_run(lines: list[str], count: int) -> None:
    assert count_running_lines(lines) == count


def test_two_programs_are_equal_by_their_results() -> None:
    assert respond({"reply": "b=7\na=b*2", "answer": "a=3\na+=4\na*=2"}) == 1.0
    assert respond({"reply": "a=13", "answer": "a=14"}) == 0.0
    assert respond({"reply": "a=14\na=?", "answer": "a=14"}) == 0.0
    assert respond({"reply": "a=14", "answer": "?"}) == 0.0


def test_programs_are_run_in_a_process_of_their_own() -> None:
    made = task(train_size=3, heldout_size=2, longest=5, operators="-*")
    for prompt in [*made.train_prompts(), *made.heldout_prompts()]:
        assert prompt.answer is not None
        lines = prompt.answer.split("\n")
        assert made.count_valid_steps(prompt, [*lines, "a-=b"]) == len(lines) in (3, 4, 5)
        assert made.reward(Rollout.from_text(prompt, prompt.answer)) == 1.0
        assert made.reward(Rollout.from_text(prompt, prompt.answer + "\na-=1")) == 0.0
    assert made.process is not None and made.process.timeouts == made.process.errors == 0
    made.process.close()


def test_heldout_expressions_do_not_depend_on_how_many_are_trained_on() -> None:
    assert task(train_size=5).heldout_prompts() == task(train_size=50).heldout_prompts()
    ids = [prompt.id for prompt in [*task().train_prompts(), *task().heldout_prompts()]]
    assert len(set(ids)) == len(ids) == 576


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"digits": "121"}, "digits '121' repeats a character"),
        ({"operators": "++"}, r"operators '\+\+' repeats a character"),
        ({"operators": "/"}, "operators"),
        ({"shortest": 5, "longest": 4}, "shortest is 5 and longest 4"),
        ({"digits": "12", "operators": "+", "longest": 3, "train_size": 8}, "there are only 8"),
    ],
)
def test_expressions_that_there_are_not_enough_of_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        task(**settings)
