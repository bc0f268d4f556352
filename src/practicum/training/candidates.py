"""Compute the student's candidates, for teachers that must be told which tokens to score."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from practicum.losses.passes import build_score_requests
from practicum.losses.signal_reader import select_top_tokens
from practicum.objective import Signal, TopK
from practicum.ports import SamplingClient, Teacher
from practicum.types import Rollout


def attach_candidates(
    client: SamplingClient,
    queries: Iterable[tuple[Teacher | None, Signal | None]],
    rollouts: Sequence[Rollout],
) -> list[Rollout]:
    """Return the rollouts with the client's k most likely tokens at each position.

    k is the largest number of candidates that any query needs; with k = 0 the rollouts are returned
    unchanged.
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
    """Return a model's k most likely tokens at each position, at most the whole vocabulary."""
    signals = client.score(build_score_requests(rollouts), TopK(k=k, support="teacher"))
    return [select_top_tokens(signal, k) for signal in signals]
