"""Compare two models in both of their representation spaces, as in DSKDv2 (arXiv 2504.11426)."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.errors import TeacherError
from practicum.functional.dual_space import BothSpaces, Projections
from practicum.functional.head import Head
from practicum.types import HeadLike, TeacherSignal

ROWS = 64
"""The number of unit vectors that go through a head at once to read its weights."""


def read_both_spaces(
    head: Head, hidden: Float[Tensor, "T D"], signal: TeacherSignal, maps: Projections
) -> BothSpaces:
    """Compute log-probabilities of student and teacher states at the same tokens through the
    opposite model's head.
    """
    states = _require_states(signal)
    assert states is not None and signal.head is not None, "an empty signal has no second space"
    states = states.to(hidden)
    common = find_common(signal, head.vocab_size).to(hidden.device)
    with torch.no_grad():
        teacher = _read_all(signal, states, common)
        ids = torch.cat([common, common.new_full((teacher.shape[-1] - len(common),), -1)])
        labels = ids[teacher.argmax(dim=-1)]
    # The student's head is detached here: the map adapts to the head, not the head to the map.
    through_student = head.detached().logprobs(states @ maps.to_student)
    through_teacher = _read_all(signal, hidden @ maps.to_teacher, common)
    return BothSpaces(through_student, through_teacher, teacher, labels)


@torch.no_grad()
def read_common_rows(
    head: Head, signal: TeacherSignal
) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K E"]] | None:
    """Return the common tokens' rows of the student's and the teacher's head; None without signal."""
    states = _require_states(signal)
    if states is None or signal.head is None:
        return None
    common = find_common(signal, head.vocab_size)
    device = head.weight.device
    student = _read_rows(head, head.weight.shape[1], common, device)
    return student, _read_rows(signal.head, states.shape[1], common, device)


def find_common(signal: TeacherSignal, size: int) -> Int[Tensor, " K"]:
    """Return the student's ids of the tokens that both models have."""
    if signal.outside is None:
        return torch.arange(size)
    is_common = torch.ones(size, dtype=torch.bool)
    is_common[signal.outside.cpu()] = False
    return is_common.nonzero()[:, 0]


def _require_states(signal: TeacherSignal) -> Tensor | None:
    """Return a teacher's states, None without signal; TeacherError for a signal without states."""
    if signal.states is None and not signal.is_empty:
        raise TeacherError(
            "signal 'dual_space' reads the hidden states of one teacher, and this teacher returns "
            "none; set signal: full, or use one teacher of type model, self or translated"
        )
    return signal.states


def _read_all(signal: TeacherSignal, states: Tensor, common: Tensor) -> Tensor:
    """Return the teacher's log-probabilities of common tokens, then of tokens that only it has."""
    assert signal.head is not None, "states come with their head"
    inside = signal.head.logprobs(states).to(states.device)[..., common]
    if signal.own is None:
        return inside
    return torch.cat([inside, signal.own.logprobs(states).to(states.device)], dim=-1)


def _read_rows(
    head: HeadLike, width: int, columns: Tensor, device: torch.device
) -> Float[Tensor, "K _"]:
    """Return the weights of some tokens of a head, including its scale and without its bias."""
    # A head may be wrapped, reordered or still loading: its logits for unit vectors are its
    # weights.
    bias = head.logits(torch.zeros(1, width, device=device))[:, columns]
    units = torch.eye(width, device=device).split(ROWS)
    return torch.cat([head.logits(part)[:, columns] - bias for part in units]).T
