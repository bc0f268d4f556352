"""Whether two models speak the same tokens."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from practicum.errors import VocabularyError
from practicum.text.renderer import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_SHOWN = 3


def check_same_vocabulary(
    student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase"
) -> int:
    """The number of tokens both share, compared as strings by id; VocabularyError with the first that differ.

    Rows of an embedding beyond the tokenizer are padding and do not count.
    """
    student_tokens, theirs = student.get_vocab(), teacher.get_vocab()
    if student_tokens == theirs:
        return len(student_tokens)
    raise VocabularyError(
        f"{_difference(student_tokens, theirs)}; losses on token probabilities need one vocabulary, "
        "so take a teacher of the student's family"
    )


def stop_mismatch(student: Renderer, teacher: Renderer) -> str | None:
    """A sentence where the two models end their answers differently, else None."""
    if student.stop_ids == teacher.stop_ids:
        return None
    return (
        f"the student stops at {_named(student)}, the teacher at {_named(teacher)}; the teacher may find the student's "
        "stop token improbable and teach it never to stop; set `stop` or `template` so that both end answers alike"
    )


def compare_renderers(student: Renderer, teacher: Renderer) -> None:
    """Raise VocabularyError where two models do not speak the same tokens, and warn where they end answers differently."""
    check_same_vocabulary(student.tokenizer, teacher.tokenizer)
    mismatch = stop_mismatch(student, teacher)
    if mismatch:
        log.warning(mismatch)


def _difference(mine: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    students = {number: token for token, number in mine.items()}
    teachers = {number: token for token, number in theirs.items()}
    ids = sorted(students.keys() | teachers.keys())
    differing = [number for number in ids if students.get(number) != teachers.get(number)]
    examples = "; ".join(
        f"id {number} is {_token(students, number)} for the student and {_token(teachers, number)} for the teacher"
        for number in differing[:_SHOWN]
    )
    sizes = f"student {len(mine)} tokens, teacher {len(theirs)}"
    if mine.keys() == theirs.keys():
        return f"the teacher's vocabulary is permuted: the same tokens, {len(differing)} under other ids ({examples})"
    if mine.items() <= theirs.items() or theirs.items() <= mine.items():
        return f"the two vocabularies agree except that one of them has {len(differing)} more ({sizes}; {examples})"
    return f"the teacher has another vocabulary: {len(differing)} of {len(ids)} ids differ ({sizes}; {examples})"


def _token(vocabulary: Mapping[int, str], number: int) -> str:
    return ascii(vocabulary[number]) if number in vocabulary else "no token"


def _named(renderer: Renderer) -> str:
    tokens = renderer.tokenizer.convert_ids_to_tokens(sorted(renderer.stop_ids))
    return (
        ", ".join(
            f"{token} ({number})"
            for token, number in zip(tokens, sorted(renderer.stop_ids), strict=True)
        )
        or "no token"
    )
