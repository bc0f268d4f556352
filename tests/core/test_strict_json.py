"""JSON from outside is read as Python reads it, or refused with a reason."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.core.strict_json import DEEPEST, MAX_DIGITS, JsonError, StrictDecoder, parse_json

TEXTS = st.text(max_size=4)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**18), 10**18)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)

REFUSED: list[tuple[str | bytes, str]] = [
    ("", "Expecting value"),
    ("{", "Expecting property name"),
    ("[1] 2", "more text follows the value, at character 4"),
    ('[{"a": 1, "b": {"c": 1, "c": 1}}]', "field 'c' stands twice"),
    ('{"\x7f\u202e": 1, "\x7f\u202e": 2}', r"field '\\x7f\\u202e' stands twice"),
    ("[NaN]", "NaN is not a number that JSON knows"),
    ("-Infinity", "-Infinity is not a number that JSON knows"),
    ("[1e999]", "1e999 is too large for a number; write it as a text"),
    ("-1e999", "-1e999 is too large for a number"),
    ("1" * (MAX_DIGITS + 1), r"1{20}\.\.\. has 41 digits; write it as a text"),
    ("9" * 10_000, ".*has 10000 digits"),
    ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "nested deeper than 20"),
    ('{"a":[' * 11 + "]}" * 11, "nested deeper than 20"),
    ("[" * 100_000, "nested deeper than 20"),
    (b'"\xff"', r"not UTF-8 \(byte 1\)"),
    (b"\xef\xbb\xbf1", "Unexpected UTF-8 BOM|Expecting value"),
    ("\u00a01", "Expecting value"),
]


@given(VALUES, st.sampled_from([None, 1]))
def test_what_python_writes_is_read_back(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert parse_json(f" \r\n{text}\t", deepest=10) == parse_json(text.encode(), 10) == value


@pytest.mark.parametrize(("text", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_strict_is_refused_with_a_reason(text: str | bytes, reason: str) -> None:
    with pytest.raises(JsonError, match=f"^(?:{reason})") as refused:
        parse_json(text)
    assert "\n" not in str(refused.value) and str(refused.value).isprintable()


def test_the_bounds_themselves_are_read() -> None:
    nested = parse_json("[" * DEEPEST + "]" * DEEPEST)
    assert nested == json.loads("[" * DEEPEST + "]" * DEEPEST)
    assert parse_json("7" * MAX_DIGITS) == int("7" * MAX_DIGITS)
    assert parse_json("[" * 100 + "]" * 100, deepest=100)


def test_a_reader_of_a_list_goes_on_after_a_problem() -> None:
    text, decoder = '{"a": 1, "a": 2},[NaN],3', StrictDecoder()
    first, end = decoder.decode_at(text, 0)
    second, next_end = decoder.decode_at(text, end + 1)
    third, _ = decoder.decode_at(text, next_end + 1)
    assert str(first) == "field 'a' stands twice" and "NaN" in str(second) and third == 3
