"""An answer of a teacher with another tokenizer, for a signal that reads more of it than tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.types import TeacherSignal


@dataclass(frozen=True, slots=True)
class TranslatedAnswer:
    """The answer at the teacher's own tokens, and their mapping to the student's tokens.

    `spans` pairs ranges of tokens, the student's and the teacher's, that cover the same bytes.
    `spell` describes how the teacher spells student tokens that it lacks. It has one row per
    teacher token: the student's id, the column of the teacher's token, and its position in the
    spelling from 0. Columns are the student's ids where both have the token, then the teacher's
    remaining tokens in the order of `TeacherSignal.own`. `find_word_starts` returns the student's and
    the teacher's tokens that begin with a space or a line break, and all control tokens.
    """

    signal: TeacherSignal
    tokens: Int[Tensor, " U"]
    spans: tuple[tuple[slice, slice], ...]
    spell: Callable[[], Int[Tensor, "N 3"]]
    find_word_starts: Callable[[], tuple[Int[Tensor, " M"], Int[Tensor, " N"]]]

    def place_states(
        self, signal: TeacherSignal, places: Sequence[int], states: Float[Tensor, "n D"]
    ) -> TeacherSignal:
        """Return the signal with the teacher's states at some of the student's tokens, unknown at others."""
        assert signal.unknown is not None, "a translated answer has unknown tokens"
        index, unknown = torch.tensor(places, dtype=torch.long), torch.ones_like(signal.unknown)
        unknown[index] = False
        hidden = states.new_zeros(len(unknown), states.shape[-1])
        return replace(
            signal, hidden=hidden.index_copy(0, index.to(states.device), states), unknown=unknown
        )
