"""Put distributions of models with different vocabularies on one support.

It is the tokens that all of them have, and one bucket for the rest; see
`practicum.functional.support`. Models with the same vocabulary keep their distributions unchanged.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.functional.support import floor_buckets, fold_outside
from practicum.objective.distribution import TeacherDistribution


def share_support(distributions: Sequence[TeacherDistribution]) -> list[TeacherDistribution]:
    """Return the distributions over the ids that all of them have, and a bucket.

    Distributions are unchanged if every model has the student's vocabulary; such distributions have
    no `outside`.
    """
    lacking = [
        part.outside for part in distributions if part.full is not None and part.outside is not None
    ]
    if not lacking:
        return list(distributions)
    # One teacher is by far the most common case, and its own distribution is already folded.
    outside = lacking[0] if len(lacking) == 1 else torch.cat(lacking).unique()
    return [_fold(part, outside) for part in distributions]


def share_pair(
    student: Float[Tensor, "T V"], teacher: TeacherDistribution
) -> tuple[Float[Tensor, "T W"], Float[Tensor, "T W"]]:
    """Return the full distributions of student and teacher on one support, ready to compare."""
    assert teacher.full is not None, "only full distributions have a support to share"
    if teacher.outside is None:
        return student, teacher.full
    folded, _ = share_support([TeacherDistribution(student), teacher])
    assert folded.full is not None
    student_logprobs, teacher_logprobs = floor_buckets([folded.full, teacher.full])
    return student_logprobs, teacher_logprobs


def _fold(part: TeacherDistribution, outside: Int[Tensor, " M"]) -> TeacherDistribution:
    if part.full is None or part.outside is outside:
        return part
    if part.outside is None:
        size, bucketed = part.full.shape[-1], outside
    else:
        size = part.full.shape[-1] - 1
        bucketed = torch.cat([outside, outside.new_tensor([size])])
    return replace(part, full=fold_outside(part.full, size, outside, bucketed), outside=outside)
