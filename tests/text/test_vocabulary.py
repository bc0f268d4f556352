import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from practicum.errors import VocabularyError
from practicum.text import (
    Renderer,
    build_character_tokenizer,
    compare_renderers,
    describe_stop_mismatch,
    map_vocabularies,
)

STUDENT = build_character_tokenizer("abcd")


def byte_pairs(*added: str) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE of a few merges with the control tokens of ChatML, then the `added` ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the hat"] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_tokens(list(added))
    return fast


def test_one_vocabulary_needs_no_map() -> None:
    assert map_vocabularies(STUDENT, STUDENT) is None
    assert map_vocabularies(STUDENT, build_character_tokenizer("abcd")) is None
    assert map_vocabularies(byte_pairs(), byte_pairs()) is None


def test_a_permuted_vocabulary_names_the_first_ids() -> None:
    expected = "permuted: the same tokens, 2 under other ids .id 7 is 'a' for the student and 'b' for the teacher; id 8"
    with pytest.raises(VocabularyError, match=expected):
        map_vocabularies(STUDENT, build_character_tokenizer("bacd"))


def test_another_vocabulary_names_sizes_and_the_way_out() -> None:
    with pytest.raises(
        VocabularyError,
        match=r"another vocabulary: 2 of the 11 ids that both have differ "
        r".student 11 tokens, teacher 12; id 8 is 'b' for the student and 'x' for the teacher; id 10",
    ):
        map_vocabularies(STUDENT, build_character_tokenizer("axcyz"))
    with pytest.raises(
        VocabularyError, match=r"each id that both have: write teacher: \{type: translated, teacher"
    ):
        map_vocabularies(STUDENT, build_character_tokenizer("abcz"))


def test_tokens_of_one_side_alone_are_mapped() -> None:
    larger = build_character_tokenizer("abcdef")
    vocabulary = map_vocabularies(STUDENT, larger)
    assert vocabulary is not None
    assert (vocabulary.student_size, vocabulary.teacher_size) == (11, 13)
    assert (vocabulary.student_only, vocabulary.teacher_only) == ((), (11, 12))
    assert vocabulary.describe().startswith(
        "the teacher has 2 tokens that the student lacks ('e', 'f'); the shared ids agree"
    )
    back = map_vocabularies(larger, STUDENT)
    assert back is not None
    assert (back.student_only, back.teacher_only) == ((11, 12), ())
    assert back.describe().startswith("the student has 2 tokens that the teacher lacks ('e', 'f')")


def test_added_special_tokens_of_a_real_tokenizer_are_mapped() -> None:
    added = ["<tool_response>", "</tool_response>", "<think>", "</think>", "<more>"]
    student, teacher = byte_pairs(), byte_pairs(*added)
    vocabulary = map_vocabularies(student, teacher)
    assert vocabulary is not None
    size = len(student)
    assert vocabulary.student_only == ()
    assert vocabulary.teacher_only == tuple(range(size, size + 5))
    assert vocabulary.teacher_names == tuple(added)
    assert (
        "5 tokens that the student lacks ('<tool_response>', '</tool_response>', '<think>', ...)"
        in vocabulary.describe()
    )
    # If each side has a token that the opposite side lacks at the same id, the ids contradict.
    with pytest.raises(VocabularyError, match=rf"id {size} is '<a>' .* and '<tool_response>'"):
        map_vocabularies(byte_pairs("<a>"), teacher)


def test_a_hole_of_one_side_belongs_to_neither() -> None:
    """Check an id below both sizes without a token: the student's row without a name, and the teacher's token."""

    class Ids:
        def __init__(self, **ids: int) -> None:
            self.ids = ids

        def get_vocab(self) -> dict[str, int]:
            return self.ids

    vocabulary = map_vocabularies(Ids(a=0, b=1, s=4), Ids(a=0, b=1, t=2, u=5))  # type: ignore[arg-type]
    assert vocabulary is not None
    # Id 3 is a hole of both.
    assert vocabulary.student_only == (2, 4)
    assert vocabulary.teacher_only == (2, 4, 5)
    assert (vocabulary.student_names, vocabulary.teacher_names) == (("s",), ("t", "u"))


def test_the_start_of_a_run_says_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="practicum.text.vocabulary")
    stops = frozenset({2})
    compare_renderers(
        Renderer(STUDENT, stop_ids=stops),
        Renderer(build_character_tokenizer("abcde"), stop_ids=stops),
    )
    (line,) = caplog.messages
    assert line == (
        "the teacher has 1 token that the student lacks ('e'); the shared ids agree, and every loss treats "
        "the other ids as one bucket"
    )


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
