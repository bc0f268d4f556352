"""Prompts and answers equal the output of `apply_chat_template`, for a template of every kind that once differed."""

import json

import pytest
from text.own_templates import TEMPLATES
from text.template_table import (
    ASKED,
    FAMILIES,
    KINDS,
    OUTCOME,
    SWITCHES,
    build_renderer,
    build_table,
    digest_code,
    try_kind,
)

from practicum.errors import DataError, ModelError
from practicum.prompts import Message
from practicum.text import Renderer

QUESTION = [Message("user", str(ASKED["content"]))]
PLAIN, THOUGHT = "It is 56.", "<think>\n7*8\n</think>\n\nIt is 56."
CASES = [
    pytest.param(name, switch, id=f"{name}, {switch}")
    for name, (template, _) in TEMPLATES.items()
    for switch in SWITCHES
    if switch == "unset" or "enable_thinking" in template
]


def renderer(name: str, thinking: bool | None = None) -> Renderer:
    return build_renderer(*TEMPLATES[name], thinking)


def behind(name: str, answer: str, thinking: bool | None = None) -> str:
    """Return the text of an answer's tokens."""
    writer = renderer(name, thinking)
    return str(writer.tokenizer.decode(writer.encode_answer(QUESTION, answer, 999)))


@pytest.mark.parametrize(("name", "switch"), CASES)
def test_every_kind_of_conversation_is_that_of_transformers_or_refused(name, switch):
    outcome = {kind: try_kind(renderer(name, SWITCHES[switch]), kind) for kind in KINDS}
    differing = {kind: found for kind, found in outcome.items() if found.startswith("DIFFERS")}
    assert not differing
    assert not outcome["plain"].startswith("refused"), outcome


OPENED = "the prompt opens thoughts"
WRITTEN = {
    ("plain turns", PLAIN, None): "It is 56.<|im_end|>",
    ("plain turns", THOUGHT, None): f"{THOUGHT}<|im_end|>",
    (OPENED, PLAIN, None): "\n</think>\n\nIt is 56.<|im_end|>",
    (OPENED, THOUGHT, None): "7*8\n</think>\n\nIt is 56.<|im_end|>",
    (f"{OPENED}, conversations drop them", PLAIN, None): "</think>\n\nIt is 56.<|im_end|>",
    (f"{OPENED}, conversations drop them", THOUGHT, None): "7*8\n</think>\n\nIt is 56.<|im_end|>",
    (f"{OPENED}, answers keep them as text", PLAIN, None): "\n</think>\n\nIt is 56.<|im_end|>",
    (f"{OPENED}, answers keep them as text", THOUGHT, None): "7*8\n</think>\n\nIt is 56.<|im_end|>",
    (f"{OPENED}, an empty block is short", PLAIN, None): "</think>It is 56.<|im_end|>",
    ("an empty block where nothing is thought", PLAIN, None): (
        "<think>\n\n</think>\n\nIt is 56.<|im_end|>"
    ),
    ("an empty block where nothing is thought", PLAIN, False): "It is 56.<|im_end|>",
    ("an empty block where nothing is thought", THOUGHT, True): f"{THOUGHT}<|im_end|>",
    ("thoughts only by their key", THOUGHT, None): "7*8\n</think>\n\nIt is 56.<|im_end|>",
    ("channels", PLAIN, None): "<|channel|>final<|message|>It is 56.<|return|>",
    ("channels", THOUGHT, None): (
        "<|channel|>analysis<|message|>7*8<|end|><|start|>assistant"
        "<|channel|>final<|message|>It is 56.<|return|>"
    ),
    ("marks around the answer", PLAIN, None): (
        "<|START_RESPONSE|>It is 56.<|END_RESPONSE|><|END|>"
    ),
    ("marks around the answer, opened by the prompt", PLAIN, None): (
        "It is 56.<|END_RESPONSE|><|END|>"
    ),
    ("no end token", PLAIN, None): "\n<think></think>\nIt is 56.<|endoftext|>",
    ("no end token", PLAIN, False): "\nIt is 56.<|endoftext|>",
    ("two end tokens", PLAIN, None): "It is 56.<|end|>",
}


@pytest.mark.parametrize(("name", "answer", "thinking"), WRITTEN)
def test_what_the_model_should_write_behind_its_prompt(name, answer, thinking):
    assert behind(name, answer, thinking) == WRITTEN[name, answer, thinking]


@pytest.mark.parametrize("name", ["an empty block where nothing is thought", "no end token"])
def test_thoughts_behind_a_closed_block_are_refused_or_left_out(name):
    writer = renderer(name, False)
    with pytest.raises(DataError, match="prompt ends after a closed block of thoughts; set"):
        writer.encode_answer(QUESTION, THOUGHT, 999)
    without = writer.encode_answer(QUESTION, THOUGHT, 999, drops_thoughts=True)
    assert without == writer.encode_answer(QUESTION, PLAIN, 999)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_is_read_back_as_the_text_that_it_was_written_from(name):
    """Check that a thinking teacher's answers have both marks around the thoughts, also if its prompt opened them."""
    writer = renderer(name)
    for answer in (PLAIN, THOUGHT):
        tokens = writer.encode_answer(QUESTION, answer, 999)
        read = writer.read_answer(QUESTION, tokens)
        assert writer.encode_answer(QUESTION, read, 999) == tokens
        assert read.replace("<think>\n\n</think>\n\n", "").strip() == answer
    cut = writer.read_answer(QUESTION, writer.encode_answer(QUESTION, THOUGHT, 999)[:3])
    assert "</think>" not in cut, "an answer that was cut within its thoughts"
    if name.startswith(OPENED):
        assert cut == "<think>\n7*8"
        assert writer.encode_answer(QUESTION, cut, 999)[:3] == writer.encode("7*8")


def test_an_end_token_in_an_answer_is_written_once():
    for text in (f"{PLAIN}<|im_end|>", f"{PLAIN}<|im_end|>\n<|im_end|>\n"):
        assert behind("plain turns", text) == f"{PLAIN}<|im_end|>"
    earlier = [*QUESTION, Message("assistant", f"{PLAIN}<|im_end|>"), Message("user", "Really?")]
    clean = [*QUESTION, Message("assistant", PLAIN), Message("user", "Really?")]
    writer = renderer("plain turns")
    assert writer.render(earlier) == writer.render(clean)
    inside = writer.encode_answer(QUESTION, "a<|im_end|>b", 999)
    assert sum(token in writer.stop_ids for token in inside) == 1, "text stays text"


def test_a_template_that_does_not_show_the_question_is_refused():
    writer = build_renderer("{% for m in messages %}{{ m.role }}{% endfor %}", ("</s>",), None)
    with pytest.raises(ModelError, match="does not show the question; write another `template:`"):
        writer.render(QUESTION)


def test_the_table_is_of_this_code_and_most_templates_write_a_plain_answer():
    table = json.loads(OUTCOME.read_text(encoding="utf-8"))
    assert table["code"] == digest_code(), (
        "the code has changed: run `python -m tests.text.template_table`, and review what changed"
    )
    rows = table["templates"]
    assert list(rows) == [name for family in FAMILIES for name in family.files]
    outcomes = [found for row in rows.values() for found in row["outcome"].values()]
    assert not [found for kinds in outcomes for found in kinds.values() if "DIFFERS" in found]
    plain = [
        name
        for name, row in rows.items()
        if all(not found["plain"].startswith("refused") for found in row["outcome"].values())
    ]
    assert len(rows) >= 28 and len(plain) / len(rows) >= 24 / 28


@pytest.mark.slow
def test_the_table_is_what_the_published_templates_write():
    assert build_table() == json.loads(OUTCOME.read_text(encoding="utf-8"))
