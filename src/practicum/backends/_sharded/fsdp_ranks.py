"""The collectives of an update over sharded ranks; see `practicum.backends.local.ranks.Ranks`.

The passes, their order and their number determine how often the ranks meet. Every rank has the
batch of all ranks and computes the same plan from it.
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

from practicum.backends._sharded.crossing import gather_all, pack, unpack
from practicum.backends._sharded.guarding import guard_layers
from practicum.backends._sharded.sharding import SharedWeight, gather_head, get_local
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.ranks import is_out_of_memory
from practicum.core.faults import inject_fault
from practicum.costs.segments import split_into_segments
from practicum.functional.head import Head
from practicum.losses.passes import Pass, build_score_requests
from practicum.text.tokenizers import shorten_error

T = TypeVar("T")


@dataclass(slots=True)
class FsdpRanks:
    """This process's place among the ranks of a sharded trainer.

    `head_weights` are gathered once per update. `place` describes the pass in progress (`number` of
    `total`) for the error of another process. `failure` is the reason why this rank computes
    nothing in the pass, or empty.
    """

    head_weights: tuple[SharedWeight, ...]
    count: int = field(default_factory=dist.get_world_size)
    rank: int = field(default_factory=dist.get_rank)
    place: str = ""
    number: int = 0
    total: int = 0
    failure: str = ""

    def deal(self, passes: Sequence[Pass]) -> Sequence[Pass | None]:
        """Return this rank's passes, padded to the number of passes of the busiest rank."""
        shares = deal_passes([_count_packed_tokens(one_pass) for one_pass in passes], self.count)
        longest = max(map(len, shares))
        self.number, self.total = 0, longest
        numbers: list[int | None] = [*shares[self.rank]]
        numbers += [None] * (longest - len(numbers))
        return [None if number is None else passes[number] for number in numbers]

    @contextmanager
    def open_update(
        self, language_model: LanguageModel, learning: Collection[torch.nn.Parameter]
    ) -> Iterator[Head]:
        """Gather the head, and sum the gradients of the weights that every rank has in full."""
        with gather_head(self.head_weights):
            inject_fault(f"rank-{self.rank}.gathered")
            yield language_model.head()
            inject_fault(f"rank-{self.rank}.differentiated")
        self.place = "the end"
        self._sum_gradients([weight for weight in learning if not isinstance(weight, DTensor)])

    def _sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients of weights that every rank has in full."""
        if not parameters:
            return
        # A weight without a gradient in any rank must not change; AdamW's momentum would move it if
        # its gradient were zeros.
        is_moved = torch.tensor(
            [parameter.grad is not None for parameter in parameters],
            dtype=torch.uint8,
            device=parameters[0].device,
        )
        dist.all_reduce(is_moved, op=dist.ReduceOp.MAX)
        for parameter, moves in zip(parameters, is_moved.tolist(), strict=True):
            if moves:
                gradient = parameter.grad
                parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
                dist.all_reduce(parameter.grad)

    def decide(self, compute: Callable[[], T]) -> T:
        """Return the first rank's result in all ranks, with tensors on the CPU."""
        answers: list[Any] = [pack(compute()) if self.rank == 0 else None]
        dist.broadcast_object_list(answers, src=0)
        return unpack(answers[0])

    @contextmanager
    def open_pass(self, language_model: LanguageModel) -> Iterator[None]:
        """Run a pass, and find out whether every rank had enough memory.

        A rank that ran out of memory still takes part in gathers and sums, and computes nothing.
        """
        self.number += 1
        self.place = f"pass {self.number} of {self.total}"
        inject_fault(f"rank-{self.rank}.pass")
        self.failure = ""
        with guard_layers(language_model, self._note_failure):
            yield
        failed = [failure for failure in self.gather(self.failure) if failure]
        if failed:
            raise torch.OutOfMemoryError(failed[0])

    def attempt(
        self, differentiate: Callable[[], Float[Tensor, "T D"]], hidden: Float[Tensor, "T D"]
    ) -> Float[Tensor, "T D"]:
        """Return the gradient, or zeros if this rank does not have enough memory."""
        if not self.failure:
            try:
                return differentiate()
            except RuntimeError as error:
                self._note_failure(error)
        return torch.zeros_like(hidden)

    def _note_failure(self, error: RuntimeError) -> None:
        """Remember that memory ran out; raise any other error."""
        if not is_out_of_memory(error):
            raise error
        self.failure = f"rank {self.rank}, {self.place}: {shorten_error(error)}"

    def gather(self, part: T) -> list[T]:
        """Return the parts of all ranks; a part has a few numbers per token."""
        return gather_all(part)

    def compute_norm(self, gradients: Collection[Tensor]) -> float:
        """Return the norm over all shards."""
        if not gradients:
            return 0.0
        # Every rank has all of an adapter, and only its own rows of every other weight.
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
    """Assign passes to ranks, the longest first, each to the rank with the least work so far."""
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        rank = loads.index(min(loads))
        shares[rank].append(number)
        loads[rank] += sizes[number]
    return [sorted(share) for share in shares]


def _count_packed_tokens(one_pass: Pass) -> int:
    """Return the number of tokens that the body reads, counting each shared prefix once."""
    segments, _ = split_into_segments(build_score_requests(one_pass.rollouts))
    return sum(len(segment.tokens) for segment in segments)
