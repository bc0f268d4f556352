"""Turn signals into distributions: apply heads, pool teachers, compare two signals."""

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from practicum import functional as F
from practicum.functional.chunked import chunks
from practicum.functional.comparison import TOP, Comparison, compare
from practicum.objective.tokens import TeacherDistribution
from practicum.types import PooledSignal, TeacherSignal


def read_tokens(signal: TeacherSignal, part: slice | Int[Tensor, " t"]) -> TeacherDistribution:
    """Return a teacher's distribution at some tokens; its head reads only their hidden states."""
    if signal.pool is not None:
        return _pool(signal.pool, [read_tokens(member, part) for member in signal.pool.members])
    full = None
    states = signal.states
    if states is not None and signal.head is not None:
        with torch.no_grad():
            full = signal.head.logprobs(states[part])
    columns = (signal.topk_ids, signal.topk_logprobs, signal.logprobs)
    return TeacherDistribution(
        full, *(None if column is None else column[part] for column in columns)
    )


@torch.no_grad()
def compare_signals(
    signals: tuple[TeacherSignal, TeacherSignal],
    tokens: Int[Tensor, " T"],
    size: int,
    measures: Collection[str],
    k: int = TOP,
) -> Comparison:
    """Compare the signals of student and teacher about the same tokens, `size` at a time.

    For a model without distributions the log-probabilities are those that it sent; see
    `practicum.functional.comparison`.
    """
    student, teacher = (signal.fetch() for signal in signals)
    # Without tokens there is one empty piece: the measures are then empty and not unknown.
    pieces = list(chunks(len(tokens), size)) or [slice(0, 0)]
    parts = (
        (read_tokens(student, piece).full, read_tokens(teacher, piece).full, tokens[piece])
        for piece in pieces
    )
    comparison = compare(parts, measures, k).known()
    sent = {
        name: read_tokens(signal, slice(None)).logprobs
        for name, signal in (("student_logprobs", student), ("teacher_logprobs", teacher))
        if name in measures and name not in comparison
    }
    return Comparison(**comparison, **sent)


@torch.no_grad()
def _pool(pool: PooledSignal, members: Sequence[TeacherDistribution]) -> TeacherDistribution:
    """Return several teachers as one: a pooled distribution or a pooled log-probability.

    The sum of their reverse KLs is smallest at the geometric pool, so a `sum` is measured against
    that pool.
    """
    full = [member.full for member in members if member.full is not None]
    if len(full) == len(members):
        if pool.kind == "arithmetic":
            return TeacherDistribution(F.arithmetic(full, pool.weights, pool.gate))
        total = sum(pool.weights) if pool.kind == "sum" else 1.0
        weights = [weight / total for weight in pool.weights]
        return TeacherDistribution(F.geometric(full, weights, pool.gate))
    tokens = torch.stack([member.logprobs for member in members if member.logprobs is not None])
    weights = torch.tensor(pool.weights)[:, None]
    if pool.kind != "arithmetic":
        # The normaliser of a geometric pool depends on the state alone, so its score function has
        # expectation 0 and the unnormalised log-probability gives the same expected gradient.
        return TeacherDistribution(logprobs=(weights * tokens).sum(dim=0))
    return TeacherDistribution(logprobs=torch.logsumexp(weights.log() + tokens, dim=0))
