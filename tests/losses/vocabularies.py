"""Two vocabularies that agree at eight ids: two more tokens in the student's, three more in the teacher's."""

from dataclasses import replace

import torch

from practicum.functional.support import fold_outside
from practicum.objective import TeacherDistribution
from practicum.types import Datum, TeacherSignal

from .test_sides import batch

STUDENT_SIZE, TEACHER_SIZE = 11, 13
STUDENT_ONLY, TEACHER_ONLY = [4, 10], [7, 11, 12]
COMMON = [0, 1, 2, 3, 5, 6, 8, 9]
OUTSIDE = torch.tensor([4, 7, 10])  # id 7 is a hole of the student's vocabulary
OWN = torch.tensor([4, 7, 10, 11, 12])


def data(*, silent: bool) -> list[Datum]:
    """Return the batch of the sides, with tokens that both vocabularies have, or with a few that only the student has."""
    datums = []
    for datum in batch():
        tokens = torch.tensor(COMMON)[datum.rollout.tokens % len(COMMON)]
        if silent and len(tokens) > 2:
            tokens[2] = 10
        datums.append(Datum(replace(datum.rollout, tokens=tokens), TeacherSignal()))
    return datums


def compact(datums: list[Datum]) -> list[Datum]:
    """Return the same data with ids that count the common tokens; tokens that only the student has get no loss."""
    place = {token: number for number, token in enumerate(COMMON)}
    result = []
    for datum in datums:
        rollout = datum.rollout
        ids = torch.tensor([place.get(token, 0) for token in rollout.tokens.tolist()])
        known = torch.tensor([token in place for token in rollout.tokens.tolist()])
        result.append(
            Datum(
                replace(rollout, tokens=ids, loss_mask=rollout.loss_mask & known), TeacherSignal()
            )
        )
    return result


def logits(seed: int, size: int, outside: float) -> torch.Tensor:
    """Return random logits at the supervised tokens; `outside` is added at tokens that only one side has."""
    count = sum(int(datum.rollout.loss_mask.sum()) for datum in batch())
    generator = torch.Generator().manual_seed(seed)
    values = 2 * torch.randn(count, size, generator=generator, dtype=torch.float64)
    values[:, [token for token in range(size) if token not in COMMON]] += outside
    return values


def fold_slowly(values: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities of the common tokens, and of all other tokens in one bucket, row by row."""
    probs = torch.softmax(values, dim=-1)
    rest = [token for token in range(values.shape[-1]) if token not in COMMON]
    columns = [probs[:, token] for token in COMMON] + [sum(probs[:, token] for token in rest)]
    return torch.stack(columns, dim=-1).log()


def signal_of(teacher: torch.Tensor, tokens: torch.Tensor, own=OWN) -> TeacherDistribution:
    full = fold_outside(torch.log_softmax(teacher, dim=-1), STUDENT_SIZE, OUTSIDE, own)
    return TeacherDistribution(full=full, outside=OUTSIDE, unknown=torch.isin(tokens, OUTSIDE))


def compare(term, student, teacher, tokens=None):
    """Ask the term's signal for its own comparison."""
    places = torch.zeros(len(student), dtype=torch.long) if tokens is None else tokens
    return term.signal.compare(term.build_comparison(student, teacher, places))
