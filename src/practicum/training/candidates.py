"""Compute the student's candidates, for teachers that must be told which tokens to score."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from practicum.functional.chunked import chunks
from practicum.objective import Signal, TopK
from practicum.objective.passes import build_score_requests
from practicum.ports import SamplingClient, Teacher
from practicum.types import Rollout, TeacherSignal

CHUNK = 128
"""The tokens whose full distributions are in memory at once."""


def attach_candidates(
    client: SamplingClient,
    queries: Iterable[tuple[Teacher | None, Signal | None]],
    rollouts: Sequence[Rollout],
) -> list[Rollout]:
    """Return the rollouts with the client's k likeliest tokens at each position.

    k is the largest number of candidates that one of the queries needs; with k = 0 the rollouts
    are returned as they are.
    """
    k = max((_count_candidates(teacher, signal) for teacher, signal in queries), default=0)
    if not k:
        return list(rollouts)
    candidate_ids = compute_candidates(client, rollouts, k)
    return [
        replace(rollout, candidates=ids)
        for rollout, ids in zip(rollouts, candidate_ids, strict=True)
    ]


def _count_candidates(teacher: Teacher | None, signal: Signal | None) -> int:
    """Return the number of the student's candidates that must be sent to a teacher."""
    if signal is None or signal.chooser != "student" or teacher is None:
        return 0
    return signal.candidates if teacher.capabilities.needs_candidates else 0


@torch.no_grad()
def compute_candidates(
    client: SamplingClient, rollouts: Sequence[Rollout], k: int
) -> list[Int[Tensor, "T K"]]:
    """Return a model's k likeliest tokens at each position, at most the whole vocabulary."""
    signals = client.score(build_score_requests(rollouts), TopK(k=k, support="teacher"))
    return [_select_top_ids(signal, k) for signal in signals]


def _select_top_ids(signal: TeacherSignal, k: int) -> Int[Tensor, "T K"]:
    if signal.topk_ids is not None:
        return signal.topk_ids.cpu()
    states = signal.states
    if states is None or signal.head is None:
        return torch.zeros(0, k, dtype=torch.long)  # an empty completion
    # Logits of the whole completion would need T x V numbers at once, so they come in chunks.
    head, width = signal.head, min(k, signal.head.vocab_size)
    parts = [
        head.logits(states[part]).topk(width, dim=-1).indices.cpu()
        for part in chunks(len(states), CHUNK)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, width, dtype=torch.long)
