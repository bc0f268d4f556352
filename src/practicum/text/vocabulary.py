"""Compare the vocabularies and stop tokens of two models."""

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from practicum.errors import VocabularyError
from practicum.text.renderer import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_MAX_EXAMPLES = 3


def check_same_vocabulary(
    student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase"
) -> int:
    """Return the size of the shared vocabulary, compared as strings by id.

    Embedding rows beyond the tokenizer are padding and do not count. Raises VocabularyError with
    the first tokens that differ.
    """
    student_tokens, teacher_tokens = student.get_vocab(), teacher.get_vocab()
    if student_tokens == teacher_tokens:
        return len(student_tokens)
    raise VocabularyError(
        f"{_describe_difference(student_tokens, teacher_tokens)}; losses on token probabilities "
        "need one vocabulary, so take a teacher of the student's family"
    )


def describe_stop_mismatch(student: Renderer, teacher: Renderer) -> str | None:
    """Return a warning if the two models end their answers differently, else None."""
    if student.stop_ids == teacher.stop_ids:
        return None
    return (
        f"the student stops at {_list_stop_tokens(student)}, the teacher at "
        f"{_list_stop_tokens(teacher)}; the teacher may find the student's stop token improbable "
        "and teach it never to stop; set `stop` or `template` so that both end answers alike"
    )


def compare_renderers(student: Renderer, teacher: Renderer) -> None:
    """Raise VocabularyError if two vocabularies differ; warn if the stop tokens differ."""
    check_same_vocabulary(student.tokenizer, teacher.tokenizer)
    mismatch = describe_stop_mismatch(student, teacher)
    if mismatch:
        log.warning(mismatch)


def _describe_difference(
    student_tokens: Mapping[str, int], teacher_tokens: Mapping[str, int]
) -> str:
    student_by_id = {number: token for token, number in student_tokens.items()}
    teacher_by_id = {number: token for token, number in teacher_tokens.items()}
    ids = sorted(student_by_id.keys() | teacher_by_id.keys())
    differing = [number for number in ids if student_by_id.get(number) != teacher_by_id.get(number)]
    examples = "; ".join(
        f"id {number} is {_quote_token(student_by_id, number)} for the student and "
        f"{_quote_token(teacher_by_id, number)} for the teacher"
        for number in differing[:_MAX_EXAMPLES]
    )
    sizes = f"student {len(student_tokens)} tokens, teacher {len(teacher_tokens)}"
    if student_tokens.keys() == teacher_tokens.keys():
        return (
            f"the teacher's vocabulary is permuted: the same tokens, {len(differing)} under other "
            f"ids ({examples})"
        )
    pairs, teacher_pairs = student_tokens.items(), teacher_tokens.items()
    if pairs <= teacher_pairs or teacher_pairs <= pairs:
        return (
            f"the two vocabularies agree except that one of them has {len(differing)} more "
            f"({sizes}; {examples})"
        )
    return (
        f"the teacher has another vocabulary: {len(differing)} of {len(ids)} ids differ "
        f"({sizes}; {examples})"
    )


def _quote_token(vocabulary: Mapping[int, str], number: int) -> str:
    return ascii(vocabulary[number]) if number in vocabulary else "no token"


def _list_stop_tokens(renderer: Renderer) -> str:
    ids = sorted(renderer.stop_ids)
    tokens = renderer.tokenizer.convert_ids_to_tokens(ids)
    named = [f"{token} ({number})" for token, number in zip(tokens, ids, strict=True)]
    return ", ".join(named) or "no token"
