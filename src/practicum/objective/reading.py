"""From what a teacher sent to what it says about tokens: its hidden states read, several teachers pooled, two compared."""

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
    """What a teacher said about a part of the tokens; its head reads that part's hidden states only."""
    if signal.pool is not None:
        return _pool(signal.pool, [read_tokens(member, part) for member in signal.pool.members])
    full = None
    states = signal.states
    if states is not None and signal.head is not None:
        with torch.no_grad():
            full = signal.head.logprobs(states[part])
    rest = (signal.topk_ids, signal.topk_logprobs, signal.logprobs)
    return TeacherDistribution(full, *(None if value is None else value[part] for value in rest))


@torch.no_grad()
def compare_signals(
    signals: tuple[TeacherSignal, TeacherSignal],
    tokens: Int[Tensor, " T"],
    size: int,
    measures: Collection[str],
    k: int = TOP,
) -> Comparison:
    """Compare what student and teacher say of the same tokens, `size` at a time; see `practicum.functional.comparison`.

    The log-probabilities of a model that gives no distribution are those that it sent.
    """
    student, teacher = (signal.fetch() for signal in signals)
    pieces = list(chunks(len(tokens), size)) or [
        slice(0, 0)
    ]  # of no tokens the measures are empty, not unknown
    parts = (
        (read_tokens(student, piece).full, read_tokens(teacher, piece).full, tokens[piece])
        for piece in pieces
    )
    known = compare(parts, measures, k).known()
    sent = {
        name: read_tokens(signal, slice(None)).logprobs
        for name, signal in (("student_logprobs", student), ("teacher_logprobs", teacher))
        if name in measures and name not in known
    }
    return Comparison(**known, **sent)


@torch.no_grad()
def _pool(pool: PooledSignal, members: Sequence[TeacherDistribution]) -> TeacherDistribution:
    """Several teachers as one: their pooled distribution, or their pooled log-probability of the sampled token.

    The sum of their reverse KLs has its least at the geometric pool, so that is what a `sum` is measured against.
    """
    full = [member.full for member in members if member.full is not None]
    if len(full) == len(members):
        if pool.kind == "arithmetic":
            return TeacherDistribution(F.arithmetic(full, pool.weights, pool.gate))
        total = sum(pool.weights) if pool.kind == "sum" else 1.0
        return TeacherDistribution(
            F.geometric(full, [weight / total for weight in pool.weights], pool.gate)
        )
    tokens = torch.stack([member.logprobs for member in members if member.logprobs is not None])
    weights = torch.tensor(pool.weights)[:, None]
    if (
        pool.kind != "arithmetic"
    ):  # its normaliser is a constant of the state, so it drops out of the expected gradient
        return TeacherDistribution(logprobs=(weights * tokens).sum(dim=0))
    return TeacherDistribution(logprobs=torch.logsumexp(weights.log() + tokens, dim=0))
