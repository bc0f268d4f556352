import pytest

from practicum.errors import VocabularyError
from practicum.text import (
    Renderer,
    build_character_tokenizer,
    check_same_vocabulary,
    describe_stop_mismatch,
)

STUDENT = build_character_tokenizer("abcd")


def test_one_vocabulary_is_counted() -> None:
    assert check_same_vocabulary(STUDENT, build_character_tokenizer("abcd")) == 11


def test_a_permuted_vocabulary_names_the_first_ids() -> None:
    expected = "permuted: the same tokens, 2 under other ids .id 7 is 'a' for the student and 'b' for the teacher; id 8"
    with pytest.raises(VocabularyError, match=expected):
        check_same_vocabulary(STUDENT, build_character_tokenizer("bacd"))


def test_another_vocabulary_names_sizes_and_the_way_out() -> None:
    with pytest.raises(
        VocabularyError,
        match=r"another vocabulary: 3 of 12 ids differ.*student 11 tokens, teacher 12",
    ):
        check_same_vocabulary(STUDENT, build_character_tokenizer("axcyz"))
    with pytest.raises(
        VocabularyError, match="need one vocabulary, so take a teacher of the student's family"
    ):
        check_same_vocabulary(STUDENT, build_character_tokenizer("abcz"))


def test_a_vocabulary_with_more_tokens_is_refused() -> None:
    expected = "agree except that one of them has 1 more .*id 11 is no token for the student and 'e' for the teacher"
    with pytest.raises(VocabularyError, match=expected):
        check_same_vocabulary(STUDENT, build_character_tokenizer("abcde"))


def test_different_stops_are_named() -> None:
    student, teacher = (
        Renderer(STUDENT, stop_ids=frozenset({2})),
        Renderer(STUDENT, stop_ids=frozenset({2, 4})),
    )
    assert describe_stop_mismatch(student, student) is None
    sentence = describe_stop_mismatch(student, teacher)
    assert sentence is not None
    assert sentence.startswith(
        "the student stops at </s> (2), the teacher at </s> (2), <assistant> (4); "
    )
