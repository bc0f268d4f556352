import html
import json
import re
import unicodedata
from collections.abc import Callable
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.text import excerpt, make_printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "plain text, caf\u00e9 \u4f60\u597d \\boxed{5}",
            "plain text, caf\u00e9 \u4f60\u597d \\boxed{5}",
        ),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        (
            "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x07",
            "\\x1b]8;;http://evil\\x1b\\link\\x1b]8;;\\x07",
        ),
        ("\x9b2J", "\\x9b2J"),
        ("a\u202eb\u2066c\u2069", "a\\u202eb\\u2066c\\u2069"),
        ("\u200bx\u200d\ufeff\u00ad", "\\u200bx\\u200d\\ufeff\\xad"),
        ("\U0001f469\u200d\U0001f4bb", "\U0001f469\\u200d\U0001f4bb"),
        ("\U000e0041", "\\U000e0041"),
        ("\u3164\u115f\u034f", "\\u3164\\u115f\\u034f"),
        ("\ud800", "\\ud800"),
        ("\ue000\ufdd0", "\\ue000\\ufdd0"),
        ("a\nb\r\nc\td\u2028e\x00\x7f\x08", "a\\nb\\r\\nc\\td\\u2028e\\x00\\x7f\\x08"),
        ("<b>[red]", "<b>[red]"),
    ],
)
def test_what_hides_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert make_printable(text) == shown


@given(st.text(alphabet=st.characters()))
def test_the_result_is_one_line_of_visible_characters(text: str) -> None:
    shown = make_printable(text)
    assert not {unicodedata.category(character) for character in shown} & {
        "Cc",
        "Cf",
        "Cs",
        "Co",
        "Zl",
        "Zp",
    }
    assert make_printable(shown) == shown


# Return a server's text in a message.

KEYS = st.text(alphabet="ABCXYZabcxyz+/=_-.%\"'\\&*", min_size=8, max_size=40).map(
    lambda text: f"sk-{text}"
)
"""Spellings that a server might choose for a key that it was sent."""
WRITINGS: dict[str, Callable[[str], str]] = {
    "plainly": str,
    "as JSON": lambda key: json.dumps(key)[1:-1],
    "as JSON in JSON": lambda key: json.dumps(json.dumps(key))[3:-3],
    "as JSON with slashes escaped": lambda key: json.dumps(key)[1:-1].replace("/", "\\/"),
    "as JSON of numbers": lambda key: "".join(f"\\u{ord(letter):04X}" for letter in key),
    "quoted": lambda key: quote(key, safe=""),
    "quoted but for slashes": quote,
    "quoted in small letters": lambda key: quote(key, safe="").lower(),
    "all quoted": lambda key: "".join(f"%{ord(letter):02x}" for letter in key),
    "as HTML": html.escape,
    "in capitals": str.upper,
}


def runs(key: str, length: int = 8) -> set[str]:
    """Return every run of `length` letters, in lower case."""
    return {key.lower()[start : start + length] for start in range(len(key) - length + 1)}


@given(
    key=KEYS,
    writing=st.sampled_from(sorted(WRITINGS)),
    before=st.text(max_size=250),
    after=st.text(max_size=50),
    begin=st.integers(0, 10),
    end=st.integers(0, 10),
    most=st.integers(20, 300),
)
def test_no_run_of_a_keys_letters_is_left_however_it_is_written_or_cut(
    key: str, writing: str, before: str, after: str, begin: int, end: int, most: int
) -> None:
    written = WRITINGS[writing](key)
    shown = excerpt(before + written[begin : len(written) - end] + after, key, most).lower()
    assert len(shown) <= most and shown == make_printable(shown)
    readings = [shown, unquote(shown), html.unescape(shown), re.sub(r"\\(.)", r"\1", shown)]
    readings.append(re.sub(r"\\u([0-9a-f]{4})", lambda code: chr(int(code[1], 16)), shown))
    assert not [run for run in runs(key) for reading in readings if run in reading]


@given(st.text(st.characters(blacklist_characters="Q"), max_size=300))
def test_a_text_without_the_key_is_only_put_on_one_line(text: str) -> None:
    assert excerpt(text, "sk-AQBQCQDQEQFQGQ", 2000) == make_printable(" ".join(text.split()))


def test_a_short_secret_is_blotted_whole() -> None:
    assert excerpt("a pin 1234, 12", "1234") == "a pin ***, 12"
    assert excerpt("****", "*") == "***" and excerpt("nothing", "") == "nothing"
