"""Turn signals into distributions: apply heads, pool teachers, compare two signals."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum import functional as F
from practicum.functional.chunked import chunks
from practicum.functional.comparison import PAIR_MEASURES, TOP, Comparison, compare
from practicum.losses.support import share_pair, share_support
from practicum.objective.distribution import TeacherDistribution
from practicum.pictures import fill_pictures
from practicum.types import PooledSignal, TeacherSignal

CHUNK = 128
"""The number of tokens with full distributions in memory at once."""


def select_top_tokens(signal: TeacherSignal, k: int) -> Int[Tensor, "T K"]:
    """Return a model's k most likely tokens at each position, at most the whole vocabulary.

    The result is empty if the signal has no distribution.
    """
    if signal.topk_ids is not None:
        return signal.topk_ids.cpu()
    states = signal.states
    if states is None or signal.head is None:
        return torch.zeros(0, k, dtype=torch.long)  # an empty completion
    # Logits of the whole completion would need T x V numbers at once, so they are computed in
    # chunks.
    head, width = signal.head, min(k, signal.head.vocab_size)
    parts = [
        head.logits(states[part]).topk(width, dim=-1).indices.cpu()
        for part in chunks(len(states), CHUNK)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, width, dtype=torch.long)


def read_tokens(
    signal: TeacherSignal,
    part: slice | Int[Tensor, " t"],
    *,
    with_level: bool = False,
    with_own: bool = False,
) -> TeacherDistribution:
    """Return a teacher's distribution at some tokens; its head reads only their hidden states.

    `with_level` adds the level of the raw logits, if the signal has them, and `with_own` adds the
    tokens that the student lacks, if any.
    """
    extras = {name: column[part] for name, column in signal.extras.items()}
    if signal.pool is not None:
        members = [read_tokens(member, part) for member in signal.pool.members]
        return replace(_pool(signal.pool, members), extras=extras)
    full = level = own_logprobs = None
    states = signal.states
    if states is not None and signal.head is not None:
        with torch.no_grad():
            if with_level:
                logits = signal.head.logits(states[part])
                full = torch.log_softmax(logits, dim=-1)
                level = measure_level(logits, full)
            else:
                full = signal.head.logprobs(states[part])
            if with_own and signal.own is not None:
                own_logprobs = signal.own.logprobs(states[part])
    columns = (signal.topk_ids, signal.topk_logprobs, signal.logprobs, signal.unknown)
    ids, topk_logprobs, logprobs, unknown = (
        None if column is None else column[part] for column in columns
    )
    return TeacherDistribution(
        full,
        ids,
        topk_logprobs,
        logprobs,
        signal.outside if full is not None else None,
        unknown,
        level,
        own_logprobs,
        extras=extras,
        constants=signal.constants,
    )


def measure_level(logits: Float[Tensor, "t V"], logprobs: Float[Tensor, "t V"]) -> Tensor:
    """Return the difference between logits and their log-probabilities, one number per position."""
    # Taken at the largest logit, which is finite and the most exact.
    return logits.amax(dim=-1) - logprobs.amax(dim=-1)


@torch.no_grad()
def compare_signals(
    signals: tuple[TeacherSignal, TeacherSignal],
    tokens: Int[Tensor, " T"],
    size: int,
    measures: Collection[str],
    k: int = TOP,
) -> Comparison:
    """Compare the signals of student and teacher about the same tokens, `size` at a time.

    For a model without distributions the log-probabilities are taken from its signal; see
    `practicum.functional.comparison`.
    """
    student, teacher = (signal.fetch() for signal in signals)
    tokens = fill_pictures(tokens)
    # Without tokens there is one empty piece: the measures are then empty and not unknown.
    pieces = list(chunks(len(tokens), size)) or [slice(0, 0)]
    pairs = (
        (read_tokens(student, piece), read_tokens(teacher, piece), tokens[piece])
        for piece in pieces
    )
    if teacher.outside is None and teacher.pool is None:
        parts = ((student.full, teacher.full, tokens) for student, teacher, tokens in pairs)
        comparison = compare(parts, measures, k).known()
    else:
        comparison = _join([compare_distributions(*pair, measures, k) for pair in pairs])
    sent = {
        name: read_tokens(signal, slice(None)).logprobs
        for name, signal in (("student_logprobs", student), ("teacher_logprobs", teacher))
        if name in measures and name not in comparison
    }
    return Comparison(**_forget_unknown({**comparison, **sent}, teacher))


def compare_distributions(
    student: TeacherDistribution,
    teacher: TeacherDistribution,
    tokens: Int[Tensor, " t"],
    measures: Collection[str],
    k: int = TOP,
) -> dict[str, Tensor]:
    """Return the measures at some tokens by name; measures of both models use their common support."""
    if teacher.outside is None or student.full is None:
        return compare([(student.full, teacher.full, tokens)], measures, k).known()
    single = [name for name in measures if name not in PAIR_MEASURES]
    pair = [name for name in measures if name in PAIR_MEASURES]
    alone = compare([(student.full, None, tokens)], single, k).known()
    alone |= compare([(None, teacher.full, tokens)], single, k).known()
    return alone | compare([(*share_pair(student.full, teacher), tokens)], pair, k).known()


def _join(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _forget_unknown(
    values: dict[str, Tensor | None], teacher: TeacherSignal
) -> dict[str, Tensor | None]:
    """Return the measures with NaN as the teacher's log-probability at tokens that it lacks."""
    logprobs, unknown = values.get("teacher_logprobs"), teacher.unknown
    if logprobs is None or unknown is None:
        return values
    logprobs = logprobs.masked_fill(unknown.to(logprobs.device), torch.nan)
    return {**values, "teacher_logprobs": logprobs}


@torch.no_grad()
def _pool(pool: PooledSignal, members: Sequence[TeacherDistribution]) -> TeacherDistribution:
    """Return several teachers as one: a pooled distribution or a pooled log-probability.

    The sum of their reverse KLs is smallest at the geometric pool, so a `sum` is measured against
    that pool.
    """
    marks = [member.unknown for member in members if member.unknown is not None]
    # A token that one member lacks has no pooled log-probability.
    unknown = torch.stack(marks).any(dim=0) if marks else None
    members = share_support(members)
    full = [member.full for member in members if member.full is not None]
    if len(full) == len(members):
        outside = members[0].outside
        if pool.kind == "arithmetic":
            pooled = F.arithmetic(full, pool.weights, pool.gate)
            return TeacherDistribution(pooled, outside=outside, unknown=unknown)
        total = sum(pool.weights) if pool.kind == "sum" else 1.0
        weights = [weight / total for weight in pool.weights]
        pooled = F.geometric(full, weights, pool.gate)
        return TeacherDistribution(pooled, outside=outside, unknown=unknown)
    tokens = torch.stack([member.logprobs for member in members if member.logprobs is not None])
    weights = torch.tensor(pool.weights)[:, None]
    if pool.kind == "arithmetic":
        pooled = torch.logsumexp(weights.log() + tokens, dim=0)
        return TeacherDistribution(logprobs=pooled, unknown=unknown)
    # The normaliser of a geometric pool depends only on the state, so its score function has
    # expectation 0 and the unnormalised log-probability gives the same expected gradient.
    return TeacherDistribution(logprobs=(weights * tokens).sum(dim=0), unknown=unknown)
