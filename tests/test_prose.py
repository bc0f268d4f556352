"""The prose measure marks sentences that are hard to read, and the rates stay within their bounds."""

from pathlib import Path

import pytest

from benchmarks import prose
from benchmarks.prose import (
    find_marks,
    measure_rate,
    read_lines,
    read_markdown,
    read_python,
    read_yaml,
)

ROOT = Path(__file__).parents[1]

MARKED = [
    "Of right answers those with few failed calls of tools are rather kept",
    "Answers of which a judge rejects a part, and another writer writes it anew",
    "nobody's account that we have says how many probes a question has; so two are ours",
    "Give pages of memory back to the system that hold weights nobody reads any more",
    "A teacher of which only the text is used, as if it were an API",
    "Return a saved recipe with today's keys; a recipe that has them stays as it is",
    "The step reads addresses, and a shard has those of its own rows alone",
    "Dearest tokens",
    "not told apart from no change",
    "Does distillation need a cold start, and how long a one?",
    "bytes a step, were it remote",
    "monitors that spoke",
]
"""Sentences from earlier versions of these pages."""

PLAIN = [
    "Replace the confidence an answer states with the measured one",
    "Correct answers with fewer failed tool calls are more likely to be kept",
    "Return the memory of unused weights to the operating system",
    "Upgrade a saved recipe to the current keys",
    "smallest gain these 256 prompts can detect (80 % power)",
    "Tokens with the highest divergence",
]
"""The sentences that replaced them."""

BOUNDS = {
    "src": 15.0,
    "docs": 15.0,
    "README.md": 15.0,
    "CONTRIBUTING.md": 15.0,
    "recipes": 15.0,
    "laboratory": 15.0,
    "examples": 15.0,
    "tests": 20.0,
    "benchmarks": 20.0,
}
"""The maximum number of marks per 10,000 words."""


@pytest.mark.parametrize("sentence", MARKED)
def test_a_sentence_that_makes_readers_stumble_is_marked(sentence: str) -> None:
    assert find_marks(sentence)


@pytest.mark.parametrize("sentence", PLAIN)
def test_a_plain_sentence_is_not_marked(sentence: str) -> None:
    assert not find_marks(sentence)


def test_code_in_a_sentence_is_not_read() -> None:
    assert not find_marks("Set `whose: alone`, see https://example.org/anew.")
    assert find_marks("Set `x` alone.")


def test_texts_are_read_wherever_users_and_contributors_meet_them() -> None:
    source = (
        '"""Doc alone."""\n'
        "x = 1  # comment alone\n"
        'short = "alone"\n'
        'message = f"{x} is not a number that stands alone here"\n'
        'name = "the first text of a table alone"\n'
    )
    lines = list(read_python(source))
    assert sorted(number for number, text in lines if find_marks(text)) == [1, 2, 4, 5]
    page = "Alone.\n```python\nalone\n```\nAlone again.\n"
    assert [number for number, _ in read_markdown(page)] == [1, 5]
    recipe = "about: Alone.\ntask: {type: x}  # alone\n"
    assert [number for number, text in read_yaml(recipe) if find_marks(text)] == [1, 2]


@pytest.mark.parametrize("name", BOUNDS)
def test_the_rate_is_within_its_bound(name: str) -> None:
    rate = measure_rate(read_lines(ROOT / name))[2]
    assert rate <= BOUNDS[name], (
        f"{rate:.0f} marks per 10,000 words; `python -m benchmarks prose {name}` lists the sentences"
    )


def test_there_are_classes_enough() -> None:
    assert len(prose.MARKS) >= 13
