"""The collectives of an update over sharded ranks; see `practicum.backends.local.ranks.Ranks`.

All that decides how often the ranks meet is computed from the batch of all ranks, which each of
them has: the passes, their order and their number.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor

from practicum.backends._sharded.sharding import SharedWeight, gather_head, get_local
from practicum.backends.local.language_model import LanguageModel
from practicum.costs.segments import split_into_segments
from practicum.functional.head import Head
from practicum.objective.passes import Pass, build_score_requests

T = TypeVar("T")


@dataclass(slots=True)
class FsdpRanks:
    """This process's place among the ranks of a sharded trainer.

    `head_weights` are those that are gathered once an update. `place` describes the pass in
    progress, for an error of another process.
    """

    head_weights: tuple[SharedWeight, ...]
    count: int = field(default_factory=dist.get_world_size)
    rank: int = field(default_factory=dist.get_rank)
    place: str = ""

    def deal(self, passes: Sequence[Pass]) -> Sequence[Pass | None]:
        """Return this rank's passes, made as many as the busiest rank has."""
        shares = deal_passes([_count_packed_tokens(one_pass) for one_pass in passes], self.count)
        longest = max(map(len, shares))
        numbers: list[int | None] = [*shares[self.rank]]
        numbers += [None] * (longest - len(numbers))
        return [None if number is None else passes[number] for number in numbers]

    @contextmanager
    def open_update(self, language_model: LanguageModel) -> Iterator[Head]:
        """Gather the head, and sum the gradients of what every rank has in full."""
        with gather_head(self.head_weights):
            yield language_model.head()
        for parameter in language_model.trainable_parameters().values():
            if not isinstance(parameter, DTensor):
                gradient = parameter.grad
                parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
                dist.all_reduce(parameter.grad)

    @contextmanager
    def open_pass(self, language_model: LanguageModel) -> Iterator[None]:
        """Run a pass."""
        yield

    def attempt(
        self, differentiate: Callable[[], Float[Tensor, "T D"]], hidden: Float[Tensor, "T D"]
    ) -> Float[Tensor, "T D"]:
        """Return the gradient."""
        return differentiate()

    def gather(self, part: T) -> list[T]:
        """Return the parts of all ranks; they are a few numbers a token."""
        parts: list[Any] = [None] * self.count
        dist.all_gather_object(parts, part)
        return parts

    def compute_norm(self, gradients: Collection[Tensor]) -> float:
        """Return the norm over all shards."""
        if not gradients:
            return 0.0
        # Every rank has the whole of an adapter, and its own rows of everything else.
        kinds = [
            [gradient for gradient in gradients if isinstance(gradient, DTensor) == is_sharded]
            for is_sharded in (True, False)
        ]
        norms = [torch.nn.utils.get_total_norm(kind) for kind in kinds if kind]
        totals = [
            (norm.full_tensor() if isinstance(norm, DTensor) else norm).item() for norm in norms
        ]
        return totals[0] if len(totals) == 1 else math.hypot(*totals)

    def clip(
        self, parameters: Collection[torch.nn.Parameter], max_norm: float, norm: float
    ) -> None:
        """Scale this rank's rows of the gradients down to `max_norm`."""
        scale = torch.clamp(max_norm / (torch.tensor(norm) + 1e-6), max=1.0)
        for parameter in parameters:
            if parameter.grad is not None:
                rows = get_local(parameter.grad)
                rows.mul_(scale.to(rows.device))


def deal_passes(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Return the numbers of each rank's passes: the longest first, to the rank with least so far."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        rank = loads.index(min(loads))
        shares[rank].append(number)
        loads[rank] += sizes[number]
    return [sorted(share) for share in shares]


def _count_packed_tokens(one_pass: Pass) -> int:
    """Return the tokens that the body reads, each shared prefix once."""
    segments, _ = split_into_segments(build_score_requests(one_pass.rollouts))
    return sum(len(segment.tokens) for segment in segments)
