"""An answer of a teacher with another tokenizer, for a signal that reads more of it than tokens."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from practicum.types import TeacherSignal


@dataclass(frozen=True, slots=True)
class TranslatedAnswer:
    """The answer at the teacher's own tokens, and how these stand for the student's.

    `spans` pairs ranges of tokens, the student's and the teacher's, that stand for the same bytes.
    `spell` returns a row for each token by which the teacher writes one that it lacks: the student's
    id, the column of the teacher's token, and its place in the spelling from 0. Columns are the
    student's ids where both have the token, then the teacher's other tokens as `TeacherSignal.own`
    orders them.
    """

    signal: TeacherSignal
    tokens: Int[Tensor, " U"]
    spans: tuple[tuple[slice, slice], ...]
    spell: Callable[[], Int[Tensor, "N 3"]]
