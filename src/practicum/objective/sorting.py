"""Compare the distributions of two vocabularies by rank, as ULD and GOLD do."""

import torch
from torch import Tensor

from practicum.errors import TeacherError
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.sorting import sorted_l1
from practicum.objective.spec import Term
from practicum.objective.tokens import TeacherDistribution


def compare_by_rank(
    term: Term, student: Tensor, teacher: TeacherDistribution, *, matched: bool
) -> Tensor:
    """Return the distance of sorted probabilities at each position, differentiable in the student.

    With `matched` it is the divergence of the tokens that both have, times their share of the
    teacher's vocabulary, plus the distance of all others times the rest (GOLD). Raises TeacherError
    for a teacher whose other tokens are known by their sum only.
    """
    full, unshared = teacher.full, teacher.own
    assert full is not None, "the signal asks for whole distributions"
    if teacher.outside is None:
        return _sum_matched(term, student, full) if matched else sorted_l1(student, full)
    if unshared is None:
        raise TeacherError(
            f"signal 'sorted' reads every token of the {term.against}, and of several teachers of "
            "other vocabularies only the common ones are known; write signal: full, or one teacher"
        )
    # The bucket is left out: its tokens are ranked one by one.
    is_shared = torch.ones(student.shape[-1], dtype=torch.bool, device=student.device)
    is_shared[teacher.outside] = False
    shared = is_shared.nonzero()[:, 0]
    if not matched:
        return sorted_l1(student, torch.cat([full[:, shared], unshared], dim=-1))
    # The published weight counts tokens of the vocabulary, whatever mass is on them.
    weight = len(shared) / (len(shared) + unshared.shape[-1])
    ranked = sorted_l1(student[:, teacher.outside], unshared)
    same = _sum_matched(term, student[:, shared], full[:, shared])
    return weight * same + (1.0 - weight) * ranked


def _sum_matched(term: Term, student: Tensor, teacher: Tensor) -> Tensor:
    entry = DIVERGENCES[term.divergence.name]
    return entry.contributions(student, teacher, term.parameter).sum(dim=-1)
