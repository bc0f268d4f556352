"""Whether two models speak the same tokens."""

from transformers import PreTrainedTokenizerBase

from practicum.errors import VocabularyError
from practicum.text.renderer import Renderer

SHOWN = 3


def check_same_vocabulary(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> int:
    """The number of tokens both share, compared as strings by id; VocabularyError with the first that differ.

    Rows of an embedding beyond the tokenizer are padding and do not count.
    """
    mine, theirs = student.get_vocab(), teacher.get_vocab()
    if mine == theirs:
        return len(mine)
    by_id = {number: token for token, number in mine.items()}
    other = {number: token for token, number in theirs.items()}
    differing = [number for number in sorted(by_id.keys() | other.keys()) if by_id.get(number) != other.get(number)]
    examples = "; ".join(f"id {n}: {by_id.get(n)!r} against {other.get(n)!r}" for n in differing[:SHOWN])
    kind = "permuted: the same size, but other tokens at" if len(mine) == len(theirs) else "another: they differ at"
    raise VocabularyError(
        f"the teacher's vocabulary is {kind} {len(differing)} ids (student {len(mine)} tokens, teacher {len(theirs)}; {examples}); "
        "losses on token probabilities need one vocabulary, so take a teacher of the student's family"
    )


def stop_mismatch(student: Renderer, teacher: Renderer) -> str | None:
    """A sentence where the two models end their answers differently, else None."""
    if student.stop_ids == teacher.stop_ids:
        return None
    names = [
        ", ".join(str(side.tokenizer.convert_ids_to_tokens(number)) for number in sorted(side.stop_ids))
        for side in (student, teacher)
    ]
    return (
        f"the student stops with {names[0]}, the teacher with {names[1]}; the teacher will find the student's stop token "
        "improbable and teach it never to stop; set `stop` or `template` so that both end answers alike"
    )
