"""Compare student and teacher in the teacher's vocabulary, as X-Token's P-KL does."""

import torch
from torch import Tensor

from practicum.errors import TeacherError
from practicum.functional.distributions import SMALLEST_TAIL
from practicum.functional.divergences import DIVERGENCES, SMALLEST
from practicum.functional.projection import decay_weights, pair_columns, project
from practicum.functional.sorting import sorted_l1
from practicum.objective.spec import Term
from practicum.objective.tokens import TeacherDistribution


def compare_projected(
    term: Term,
    student: Tensor,
    teacher: TeacherDistribution,
    decay: float,
    paired: float | None = None,
) -> Tensor:
    """Return the divergence at each position in the teacher's vocabulary, or with `paired` by pairs.

    A token of the teacher's that no token of the student's leads to has the smallest tail, which is
    constant. Raises TeacherError for a teacher that does not tell how it writes what it lacks.
    """
    entry, full = DIVERGENCES[term.divergence.name], teacher.full
    assert full is not None, "the signal asks for whole distributions"
    if teacher.outside is None:
        return entry.contributions(student, full, term.parameter).sum(dim=-1)
    spellings, unshared = teacher.spellings, teacher.own
    if spellings is None or unshared is None:
        raise TeacherError(
            f"signal 'projected' needs to know how the {term.against} writes the tokens that it "
            "lacks, which one teacher of type translated tells; write signal: full"
        )
    size = student.shape[-1]
    is_shared = torch.ones(size, dtype=torch.bool, device=student.device)
    is_shared[teacher.outside] = False
    shared, width = is_shared.nonzero()[:, 0], size + unshared.shape[-1]
    weights = decay_weights(spellings.tokens, spellings.places, size, decay)
    if paired is not None:
        target = torch.cat([full[:, :-1], unshared], dim=-1)
        pairs = pair_columns(shared, spellings.tokens, spellings.columns, weights, paired)
        return _compare_pairs(term, student, target, *pairs, is_shared)
    probs = project(student, shared, spellings.tokens, spellings.columns, weights, width)
    is_reached = torch.zeros(width, dtype=torch.bool, device=student.device)
    is_reached[torch.cat([shared, spellings.columns[weights > 0]])] = True
    # The student's own tokens are columns too, which neither side gives any mass.
    reached = torch.where(is_reached, probs, SMALLEST_TAIL).clamp(min=SMALLEST).log()
    target = torch.cat([full[:, :-1], unshared], dim=-1)
    used = torch.cat([is_shared, is_reached.new_ones(unshared.shape[-1])]).nonzero()[:, 0]
    contributions = entry.contributions(reached[:, used], target[:, used], term.parameter)
    return contributions.sum(dim=-1)


def _compare_pairs(
    term: Term,
    student: Tensor,
    target: Tensor,
    tokens: Tensor,
    columns: Tensor,
    is_shared: Tensor,
) -> Tensor:
    """Return the divergence of paired tokens and the distance of all others by rank (H-KL)."""
    entry = DIVERGENCES[term.divergence.name]
    same = entry.contributions(student[:, tokens], target[:, columns], term.parameter)
    unpaired = torch.ones(student.shape[-1], dtype=torch.bool, device=student.device)
    unpaired[tokens] = False
    unpaired_columns = torch.ones(target.shape[-1], dtype=torch.bool, device=student.device)
    # Columns of the student's own tokens are no tokens of the teacher's.
    unpaired_columns[: len(is_shared)] = is_shared
    unpaired_columns[columns] = False
    ranked = sorted_l1(student[:, unpaired], target[:, unpaired_columns])
    return same.sum(dim=-1) + ranked
