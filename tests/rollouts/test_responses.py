"""Rows with answers that cannot be imitated are refused before any step, all at once."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from text.test_renderer import RENDERER
from toy import toy_recipe

from practicum.core.waits import Wait, display_waits
from practicum.errors import DataError
from practicum.rollouts import SourceChoice, check_answers
from practicum.runs.assembly import assemble_run
from practicum.runs.inputs import check_inputs
from practicum.types import Message, Prompt

EMPTY_THOUGHTS = "{{ '<think>\\n\\n</think>\\n\\n' }}"
CLOSED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and '</think>' not in m.content %}"
    + EMPTY_THOUGHTS
    + "{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    + EMPTY_THOUGHTS
    + "{% endif %}"
)
"""ChatML with prompts that end after a closed block of thoughts."""
REFUSES_DD = (
    "{% for m in messages %}{% if m.content == 'dd' %}{{ raise_exception('no dd') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
"""A template that cannot write one answer."""
RENDERERS = {
    "open": RENDERER,
    "closed": replace(RENDERER, template=CLOSED),
    "stopped": replace(RENDERER, stop_ids=frozenset({258, ord("z")})),
}
ROWS = {
    "plain": {"response": "56"},
    "an answer": {"answer": "56"},
    "thoughts": {"response": "<think>\n7*8\n</think>\n\n56"},
    "apart": {"response": "56", "reasoning": "7*8"},
    "neither": {},
    "a stop token": {"response": "a z b"},
    "a stop token at the end": {"response": "a z"},
    "a stop token late": {"response": "a" * 30 + "z b"},
}
QUESTION = (Message("user", "8*7?"),)


def check(name: str, prompts: list[Prompt], source: str = "dataset") -> None:
    choice = TypeAdapter(SourceChoice).validate_python(source)
    check_answers(choice, prompts, RENDERERS[name], 16)


@pytest.mark.parametrize("name", RENDERERS)
@pytest.mark.parametrize("row", ROWS)
def test_rows_are_refused_exactly_where_their_steps_would_be(name: str, row: str) -> None:
    from practicum.rollouts.responses import encode_response

    prompt = Prompt("x", QUESTION, **ROWS[row])
    refusal = None
    try:
        encode_response(prompt, RENDERERS[name], "dataset", 16)
    except DataError as error:
        refusal = str(error)
    if refusal is None:
        return check(name, [prompt])
    with pytest.raises(DataError) as checked:
        check(name, [prompt])
    assert str(checked.value) == (
        "1 of 1 rows have no answer that rollout.source 'dataset' can imitate; the first is "
        + refusal
    )


def test_all_rows_are_counted_and_the_first_is_named() -> None:
    prompts = [Prompt(f"p{number}", QUESTION, response="56") for number in range(6)]
    for number in (2, 4):
        prompts[number] = replace(prompts[number], response="<think>\n7*8\n</think>\n\n56")
    for source in ("dataset", "mix(0.5)", "join(dataset)", "prefix(2, origin=dataset)"):
        with pytest.raises(DataError) as refusal:
            check("closed", prompts, source)
        text = str(refusal.value)
        assert text.startswith("2 of 6 rows have no answer that rollout.source ") and "'p2'" in text
        assert text.endswith("set `thinking: true` for this model, or remove the thoughts")
    for source in ("student", "teacher", "join(teacher)", "prefix(2)", "mix(other=replay)"):
        check("closed", prompts, source)


def test_the_wait_tells_how_many_rows_are_read() -> None:
    seen: list[tuple[str, int, int | None]] = []

    def display(wait: Wait) -> None:
        seen.append((wait.name, wait.progress, wait.total))

    with display_waits(display):
        check("open", [Prompt("a", QUESTION, response="56")] * 3)
    assert seen[-1] == ("reading the answers to imitate", 3, 3)


def test_long_answers_are_read_without_their_tokens() -> None:
    prompts = [Prompt("a", QUESTION, response="word " * 20_000)] * 10
    start = time.process_time()
    check("open", prompts)
    assert time.process_time() - start < 2


def test_check_and_run_refuse_the_rows_before_the_first_step(models: Path, tmp_path: Path) -> None:
    prompts = ("aa", "ab", "ac", "ad", "ba", "bb", "bc", "bd")
    rows = [{"id": f"r{row}", "prompt": text, "response": "ba"} for row, text in enumerate(prompts)]
    (tmp_path / "heldout.jsonl").write_text(json.dumps(rows.pop()))
    rows[6]["response"] = "dd"
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = toy_recipe(
        models,
        {
            "task": {
                "type": "jsonl",
                "path": str(tmp_path / "rows.jsonl"),
                "heldout": str(tmp_path / "heldout.jsonl"),
            },
            "student.template": REFUSES_DD,
            "rollout.source": "dataset",
            "train.prompts_per_step": 1,
            "train.steps": 1,
        },
    )
    for load in (lambda: check_inputs(recipe, "r.yaml"), lambda: assemble_run(recipe, tmp_path)):
        with pytest.raises(DataError, match=r"^1 of 7 rows have no answer.* prompt 'r6': "):
            load()
