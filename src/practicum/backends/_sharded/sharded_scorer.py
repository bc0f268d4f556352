"""Score with a sharded frozen model: each rank reads its own texts at the same time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from practicum.backends._sharded.slices import ShardedModel
from practicum.backends.local.device_limits import find_limits
from practicum.backends.local.packing import compute_hidden_states
from practicum.backends.local.sampler import LocalSampler
from practicum.backends.local.trainer import ONE_TOKEN
from practicum.costs.segments import split_by_tokens
from practicum.functional.head import Head
from practicum.objective import Signal
from practicum.types import ScoreRequest, TeacherSignal


@dataclass(frozen=True, slots=True)
class ShardedScorer:
    """A sharded frozen model; all ranks call its methods together, each with its own texts."""

    sharded: ShardedModel
    chunk_tokens: int

    @torch.no_grad()
    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Score this rank's texts; a rank with fewer passes stays in step with the other ranks."""
        model = self.sharded.language_model
        limit = find_limits(model.device).scored_tokens
        passes = len(list(split_by_tokens(requests, limit, model.max_packed_tokens)))
        counts: list[Any] = [0] * dist.get_world_size()
        dist.all_gather_object(counts, passes)
        # The head is gathered once for all passes of the call.
        with self.sharded.open():
            sampler = LocalSampler(model, chunk_tokens=self.chunk_tokens)
            signals = sampler.score(requests, signal)
            for _ in range(max(counts) - passes):
                compute_hidden_states(model, [ONE_TOKEN])
        return signals

    def gather_head(self) -> Head:
        """Return the head in full in every rank."""
        with self.sharded.open():
            return self.sharded.language_model.head().detached()
