"""The call syntax parses its own output, and names a correction for text that it cannot parse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from practicum.core.calls import bind, format_call, parse_call, suggest_name

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
NUMBERS = st.integers() | st.floats(allow_nan=False)
TEXTS = NAMES.filter(lambda text: text.lower() not in ("nan", "inf", "infinity"))


@given(NAMES, st.dictionaries(NAMES, NUMBERS | TEXTS, max_size=4))
def test_what_is_formatted_is_parsed_back(name, arguments):
    assert parse_call(format_call(name, arguments)) == (name, [], arguments)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("jsd", ("jsd", [], {})),
        ("jsd()", ("jsd", [], {})),
        (" jsd ( 0.3 ) ", ("jsd", [0.3], {})),
        (
            "topk(20, support=student, tail='bucket')",
            ("topk", [20], {"support": "student", "tail": "bucket"}),
        ),
        ("threshold(-inf)", ("threshold", [float("-inf")], {})),
        ("prefix(1e3)", ("prefix", [1000.0], {})),
    ],
)
def test_calls_are_read_as_written(text, parsed):
    assert parse_call(text) == parsed


@pytest.mark.parametrize("text", ["", "(0.3)", "jsd(0.3", "jsd 0.3", "3", "jsd(0.3) x", "a-b(1)"])
def test_what_is_no_call_is_refused_with_an_example(text):
    with pytest.raises(
        ValueError, match=r"is not a name with arguments; write for example 'jsd\(0\.3\)'"
    ):
        parse_call(text)


def test_a_call_that_yaml_cut_at_its_comma_is_told_of_quotes() -> None:
    with pytest.raises(
        ValueError, match="a call with a comma in quotes if it stands within braces"
    ):
        parse_call("topk(4")


def test_a_positional_argument_comes_before_the_named_ones():
    with pytest.raises(
        ValueError, match=r"'topk\(k=3, student\)' has a positional argument after a named one"
    ):
        parse_call("topk(k=3, student)")


@pytest.mark.parametrize("text", ["jsd(beta=0.1, beta=0.2)", "jsd(0.1, beta=0.2)"])
def test_an_argument_given_twice_is_refused(text):
    with pytest.raises(ValueError, match=r"gives 'beta' twice"):
        bind("divergence", text, ["beta"])


def test_too_many_arguments_are_counted():
    with pytest.raises(ValueError, match="divergence 'jsd' takes beta, but 2 values were given"):
        bind("divergence", "jsd(0.1, 0.2)", ["beta"])
    with pytest.raises(
        ValueError, match="divergence 'tvd' takes no arguments, but 1 values were given"
    ):
        bind("divergence", "tvd(0.1)", [])


def test_an_unknown_argument_gets_the_nearest_name():
    with pytest.raises(
        ValueError, match=r"has no parameter 'bata'; did you mean 'beta'\? known: beta"
    ):
        bind("divergence", "jsd(bata=1)", ["beta"])


def test_the_nearest_name_is_offered_only_where_one_is_near():
    assert (
        suggest_name("revers_kl", ["jsd", "reverse_kl"])
        == "did you mean 'reverse_kl'? known: jsd, reverse_kl"
    )
    assert suggest_name("xyzzy", ["jsd", "reverse_kl"]) == "known: jsd, reverse_kl"
