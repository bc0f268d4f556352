"""The student's own candidates, for teachers that have to be told which tokens to score."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from practicum.functional.chunked import chunks
from practicum.objective import Signal, TopK
from practicum.ports import SamplingClient, Teacher
from practicum.types import Rollout, ScoreRequest, TeacherSignal

CHUNK = 128
"""So many tokens' whole distributions are held at once."""


def attach_candidates(
    client: SamplingClient,
    asked: Iterable[tuple[Teacher | None, Signal | None]],
    rollouts: Sequence[Rollout],
) -> list[Rollout]:
    """The rollouts with the client's likeliest tokens at each position, as many as any of the teachers has to be told."""
    wanted = max((_told(teacher, signal) for teacher, signal in asked), default=0)
    if not wanted:
        return list(rollouts)
    candidate_ids = compute_candidates(client, rollouts, wanted)
    return [
        replace(rollout, candidates=ids)
        for rollout, ids in zip(rollouts, candidate_ids, strict=True)
    ]


def _told(teacher: Teacher | None, signal: Signal | None) -> int:
    """Return how many of the student's candidates a teacher has to be told."""
    if signal is None or signal.chooser != "student" or teacher is None:
        return 0
    return signal.candidates if teacher.capabilities.needs_candidates else 0


@torch.no_grad()
def compute_candidates(
    client: SamplingClient, rollouts: Sequence[Rollout], k: int
) -> list[Int[Tensor, "T K"]]:
    """A model's k likeliest tokens at each position, fewer where the vocabulary has fewer."""
    requests = [
        ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist())) for rollout in rollouts
    ]
    return [_ids(said, k) for said in client.score(requests, TopK(k=k, support="teacher"))]


def _ids(said: TeacherSignal, k: int) -> Int[Tensor, "T K"]:
    if said.topk_ids is not None:
        return said.topk_ids.cpu()
    states = said.states
    if states is None or said.head is None:
        return torch.zeros(0, k, dtype=torch.long)  # an empty completion
    head, width = said.head, min(k, said.head.vocab_size)
    parts = [
        head.logits(states[part]).topk(width, dim=-1).indices.cpu()
        for part in chunks(len(states), CHUNK)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, width, dtype=torch.long)
