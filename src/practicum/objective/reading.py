"""From what a teacher sent to what it says about tokens: its hidden states read, several teachers pooled."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from practicum import functional as F
from practicum.objective.tokens import TeacherTokens
from practicum.types import Pool, TeacherSignal


def read_signal(signal: TeacherSignal, part: slice | Int[Tensor, " t"]) -> TeacherTokens:
    """What a teacher said about a part of the tokens; its head reads that part's hidden states only."""
    if signal.pool is not None:
        return _pooled(signal.pool, [read_signal(member, part) for member in signal.pool.members])
    full = None
    if signal.hidden is not None and signal.head is not None:
        with torch.no_grad():
            full = signal.head.logprobs(signal.hidden[part])
    rest = (signal.topk_ids, signal.topk_logprobs, signal.logprobs)
    return TeacherTokens(full, *(None if value is None else value[part] for value in rest))


@torch.no_grad()
def _pooled(pool: Pool, members: Sequence[TeacherTokens]) -> TeacherTokens:
    """Several teachers as one: their pooled distribution, or their pooled log-probability of the sampled token.

    The sum of their reverse KLs has its least at the geometric pool, so that is what a `sum` is measured against.
    """
    full = [member.full for member in members if member.full is not None]
    if len(full) == len(members):
        if pool.kind == "arithmetic":
            return TeacherTokens(F.arithmetic(full, pool.weights, pool.gate))
        total = sum(pool.weights) if pool.kind == "sum" else 1.0
        return TeacherTokens(F.geometric(full, [weight / total for weight in pool.weights], pool.gate))
    tokens = torch.stack([member.logprobs for member in members if member.logprobs is not None])
    weights = torch.tensor(pool.weights)[:, None]
    if pool.kind != "arithmetic":  # its normaliser is a constant of the state, so it drops out of the expected gradient
        return TeacherTokens(logprobs=(weights * tokens).sum(dim=0))
    return TeacherTokens(logprobs=torch.logsumexp(weights.log() + tokens, dim=0))
