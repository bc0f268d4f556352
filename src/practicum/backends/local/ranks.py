"""Coordinate the processes that train one model together; by default there is one process.

Passes are planned from the batch of all ranks, so every rank knows how many passes each rank has. A
rank with fewer passes runs passes of one token to take part in the remaining collectives.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.lookup import add_rows_in_place
from practicum.functional.head import Head
from practicum.losses.passes import Pass

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of one trainer; all of them call these methods in the same order."""

    @property
    def count(self) -> int:
        """The number of processes."""
        ...

    def deal(self, passes: Sequence[Pass]) -> Sequence[Pass | None]:
        """Return this rank's passes; None is a pass that only other ranks have."""
        ...

    def open_update(
        self, language_model: LanguageModel, learning: Collection[torch.nn.Parameter]
    ) -> AbstractContextManager[Head]:
        """Open the head for an update; closing it sums the gradients over the ranks.

        `learning` are all trained weights, including weights that were added within the block.
        """
        ...

    def decide(self, compute: Callable[[], T]) -> T:
        """Return the first rank's result in all ranks, with tensors on the CPU."""
        ...

    def open_pass(self, language_model: LanguageModel) -> AbstractContextManager[None]:
        """Keep the ranks in step during a pass, even if one of them fails.

        Raises torch.OutOfMemoryError in all ranks if one rank ran out of memory.
        """
        ...

    def attempt(
        self, differentiate: Callable[[], Float[Tensor, "T D"]], hidden: Float[Tensor, "T D"]
    ) -> Float[Tensor, "T D"]:
        """Return the gradient of the hidden states, or zeros if this rank's pass failed."""
        ...

    def gather(self, part: T) -> list[T]:
        """Return the parts of all ranks, in the order of the ranks."""
        ...

    def compute_norm(self, gradients: Collection[Tensor]) -> float:
        """Return the norm of the gradients of all ranks."""
        ...

    def clip(
        self, parameters: Collection[torch.nn.Parameter], max_norm: float, norm: float
    ) -> None:
        """Scale the gradients, which have a known norm, down to `max_norm`."""
        ...


@dataclass(frozen=True, slots=True)
class OneRank:
    """A trainer with only one process; see `Ranks`."""

    count: int = 1

    def deal(self, passes: Sequence[Pass]) -> Sequence[Pass | None]:
        """Return all passes."""
        return passes

    @contextmanager
    def open_update(
        self, language_model: LanguageModel, learning: Collection[torch.nn.Parameter]
    ) -> Iterator[Head]:
        """Yield the model's head."""
        yield language_model.head()

    def decide(self, compute: Callable[[], T]) -> T:
        """Return the result of `compute`."""
        return compute()

    def open_pass(self, language_model: LanguageModel) -> AbstractContextManager[None]:
        """Add the embedding's gradient in place; no other rank waits."""
        return add_rows_in_place(language_model)

    def attempt(
        self, differentiate: Callable[[], Float[Tensor, "T D"]], hidden: Float[Tensor, "T D"]
    ) -> Float[Tensor, "T D"]:
        """Return the gradient."""
        return differentiate()

    def gather(self, part: T) -> list[T]:
        """Return the only part."""
        return [part]

    def compute_norm(self, gradients: Collection[Tensor]) -> float:
        """Return the norm of the gradients."""
        return torch.nn.utils.get_total_norm(gradients).item() if gradients else 0.0

    def clip(
        self, parameters: Collection[torch.nn.Parameter], max_norm: float, norm: float
    ) -> None:
        """Scale the gradients down to `max_norm`."""
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.tensor(norm))


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return True if an error is an out-of-memory error."""
    # The CPU allocator raises a plain RuntimeError, which can only be recognized by its text.
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
