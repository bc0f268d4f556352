import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.grading.grammars import (
    DEEPEST,
    LONGEST,
    match_pattern,
    read_arithmetic,
    read_list,
    read_mathematics,
    try_both,
)

HOSTILE = [
    "__import__('os').system('touch F')",
    "[__import__('os').system('touch F'), 1]",
    "().__class__.__base__.__subclasses__()",
    "x.__class__",
    "(1).real",
    "[1][0]",
    "[c for c in (1, 2)]",
    "lambda: 1",
    "exec",
    "os",
    "print(1)",
    "S('x')",
    "f(x)",
    "x(1)",
    "sin",
    "1; 2",
    "1\n2",
    "x = 1",
    "x := 1",
    "x if x else x",
    "[x]",
    "{1: 2}",
    "['a' 'b']",
    r"['\x41']",
    "['''a''']",
    "f'{1}'",
    "b'a'",
    "[*'ab']",
    "1e999",
    "1_000",
    "2!",
    "@",
    "`1`",
    "\u0661 + 1",
    "\uff11",
    "1 +",
    "(1",
    "1)",
    "[1, 2",
    "[1,, 2]",
    "",
    "9" * (LONGEST + 1),
    "(" * 2 * DEEPEST + "1" + ")" * 2 * DEEPEST,
    "-" * 2 * DEEPEST + "1",
    "2**" * 2 * DEEPEST + "1",
    "[" * 2 * DEEPEST + "]" * 2 * DEEPEST,
]


@pytest.mark.parametrize("reply", HOSTILE)
def test_nothing_but_sentences_passes(reply: str) -> None:
    assert [grammar(reply) for grammar in (read_arithmetic, read_mathematics, read_list)] == [
        None,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ("10*(8 - 5) - 6", "10 * ( 8 - 5 ) - 6"),
        ("-1 + 72*(89 - 77)/1", "- 1 + 72 * ( 89 - 77 ) / 1"),
        ("2**-.5\t", "2 ** - .5"),
        ("3./+2", "3. / + 2"),
    ],
)
def test_arithmetic_is_written_anew(reply: str, sentence: str) -> None:
    assert read_arithmetic(reply) == read_mathematics(reply) == sentence


@pytest.mark.parametrize(
    "reply",
    ["x*asin(3*x) + sqrt(1 - 9*x**2)/3 + C", "3*Integral(x**3*cos(3*x), x)", "E**(x)", "2*pi*(y)"],
)
def test_mathematics_has_variables_and_known_functions_beside(reply: str) -> None:
    sentence = read_mathematics(reply)
    assert sentence is not None and sentence.replace(" ", "") == reply.replace(" ", "")
    assert read_arithmetic(reply) is None


@pytest.mark.parametrize(
    "reply",
    ["[[1, 0], [-2, 3.5]]", "(1, 2,)", "['Q', \"_\"]", "[]", "'ABC'", "7", "[\n  ['1'],\n ('2',)]"],
)
def test_lists_hold_numbers_and_texts(reply: str) -> None:
    sentence = read_list(reply)
    assert sentence is not None and "".join(sentence.split()) == "".join(reply.split())


def test_a_pattern_holds_for_the_whole_text_and_either_grammar_will_do() -> None:
    letters = match_pattern("[A-E]+")
    assert [letters(reply) for reply in ("ABE", "ABx", "ABE\n", "A" * (LONGEST + 1))] == [
        "ABE",
        None,
        None,
        None,
    ]
    assert [try_both(read_list, letters)(reply) for reply in ("ABE", "['A']", "x")] == [
        "ABE",
        "[ 'A' ]",
        None,
    ]


@given(st.text(alphabet="0123456789.+-*/() xC,[]'_sin\n", max_size=40))
def test_a_sentence_is_its_own_sentence(reply: str) -> None:
    for grammar in (read_arithmetic, read_mathematics, read_list):
        sentence = grammar(reply)
        assert sentence is None or grammar(sentence) == sentence
