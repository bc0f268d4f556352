"""Compare the vocabularies and stop tokens of two models."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from practicum.errors import VocabularyError
from practicum.text.renderer import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_MAX_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class VocabularyMap:
    """Two vocabularies that agree at all shared ids; each may have additional ids.

    `student_only` are the ids below `student_size` that the teacher lacks, and `teacher_only` the
    ids below `teacher_size` that the student lacks. A size is the largest id plus one: embedding
    rows beyond it are padding, and belong to neither. The names are the tokens of these ids. An id
    without a name is a hole: its token is missing in this vocabulary.
    """

    student_size: int
    teacher_size: int
    student_only: tuple[int, ...]
    teacher_only: tuple[int, ...]
    student_names: tuple[str, ...]
    teacher_names: tuple[str, ...]

    def describe(self) -> str:
        """Return one line about the tokens of one side and what becomes of them."""
        sides = [
            f"the {owner} has {len(names)} {'token' if len(names) == 1 else 'tokens'} that the "
            f"{lacking} lacks ({', '.join(map(ascii, names[:_MAX_EXAMPLES]))}"
            f"{', ...' if len(names) > _MAX_EXAMPLES else ''})"
            for owner, lacking, names in (
                ("teacher", "student", self.teacher_names),
                ("student", "teacher", self.student_names),
            )
            if names
        ]
        return (
            f"{' and '.join(sides)}; the shared ids agree, and every loss treats the other ids as one "
            "bucket"
        )


def map_vocabularies(
    student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase"
) -> VocabularyMap | None:
    """Compare two vocabularies as strings by id; return None if they are the same.

    Raises VocabularyError with the first ids under which both have a token and not the same one.
    """
    if student is teacher:
        return None
    student_tokens, teacher_tokens = student.get_vocab(), teacher.get_vocab()
    if student_tokens == teacher_tokens:
        return None
    student_by_id = {number: token for token, number in student_tokens.items()}
    teacher_by_id = {number: token for token, number in teacher_tokens.items()}
    common = student_by_id.keys() & teacher_by_id.keys()
    if any(student_by_id[number] != teacher_by_id[number] for number in common):
        raise VocabularyError(
            f"{_describe_difference(student_tokens, teacher_tokens)}; losses on token "
            "probabilities need the same token under each id that both have: write teacher: {type: "
            "translated, teacher: ...} with signal: sampled, and the teacher reads the student's "
            "text in its own tokens"
        )
    sizes = max(student_by_id, default=-1) + 1, max(teacher_by_id, default=-1) + 1
    # An id without a token, below both sizes, is a hole that both have.
    differing = [
        number
        for number in range(max(sizes))
        if (number in student_by_id) != (number in teacher_by_id) or number >= min(sizes)
    ]
    student_only = tuple(number for number in differing if number < sizes[0])
    teacher_only = tuple(number for number in differing if number < sizes[1])
    return VocabularyMap(
        *sizes,
        student_only,
        teacher_only,
        tuple(student_by_id[number] for number in student_only if number in student_by_id),
        tuple(teacher_by_id[number] for number in teacher_only if number in teacher_by_id),
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


def compare_renderers(student: Renderer, teacher: Renderer) -> VocabularyMap | None:
    """Return how two vocabularies differ; None if they are the same.

    Notes tokens that only one of them has, and warns if the stop tokens differ. Raises
    VocabularyError if the vocabularies contradict each other.
    """
    vocabulary = map_vocabularies(student.tokenizer, teacher.tokenizer)
    if vocabulary is not None:
        log.info(vocabulary.describe())
    mismatch = describe_stop_mismatch(student, teacher)
    if mismatch:
        log.warning(mismatch)
    return vocabulary


def _describe_difference(
    student_tokens: Mapping[str, int], teacher_tokens: Mapping[str, int]
) -> str:
    student_by_id = {number: token for token, number in student_tokens.items()}
    teacher_by_id = {number: token for token, number in teacher_tokens.items()}
    ids = sorted(student_by_id.keys() | teacher_by_id.keys())
    common = [number for number in ids if number in student_by_id and number in teacher_by_id]
    differing = [number for number in common if student_by_id[number] != teacher_by_id[number]]
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
    return (
        f"the teacher has another vocabulary: {len(differing)} of the {len(common)} ids that both "
        f"have differ ({sizes}; {examples})"
    )


def _quote_token(vocabulary: Mapping[int, str], number: int) -> str:
    return ascii(vocabulary[number]) if number in vocabulary else "no token"


def _list_stop_tokens(renderer: Renderer) -> str:
    ids = sorted(renderer.stop_ids)
    tokens = renderer.tokenizer.convert_ids_to_tokens(ids)
    named = [f"{token} ({number})" for token, number in zip(tokens, ids, strict=True)]
    return ", ".join(named) or "no token"
