import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, caf\u00e9 \u4f60\u597d \\boxed{5}", "plain text, caf\u00e9 \u4f60\u597d \\boxed{5}"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x07", "\\x1b]8;;http://evil\\x1b\\link\\x1b]8;;\\x07"),
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
    assert printable(text) == shown


@given(st.text(alphabet=st.characters()))
def test_the_result_is_one_line_of_visible_characters(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
    assert printable(shown) == shown
