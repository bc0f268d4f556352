"""Hidden states and heads by their names: held in the child, fetched by whoever reads them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from practicum.types import HeadLike

HELD: dict[str, Any] = {}
"""In the child: what names stand for."""

ASK: dict[int, Callable[[str], Any]] = {}
"""In the parent: how to fetch what a name stands for, by the child's process."""


def fetch(process: int, name: str) -> Any:
    """Return what a name stands for, wherever this is asked."""
    return HELD[name] if process == os.getpid() else ASK[process](name)


@dataclass(frozen=True)
class ChildStates:
    """See `practicum.types.StatesLike`."""

    process: int
    name: str
    length: int
    finite: bool

    def __len__(self) -> int:
        return self.length

    def fetch(self) -> Tensor:
        return fetch(self.process, self.name)


@dataclass(frozen=True)
class ChildHead:
    """See `practicum.types.HeadLike`."""

    process: int
    number: int
    vocab_size: int

    @property
    def key(self) -> tuple[int, ...]:
        return self.process, self.number, self.vocab_size

    def logprobs(self, hidden: Tensor) -> Tensor:
        return self._head().logprobs(hidden)

    def logits(self, hidden: Tensor, room: Callable[[], Tensor] | None = None) -> Tensor:
        return self._head().logits(hidden, room)

    def release(self) -> None:
        """It is fetched each time."""

    def _head(self) -> HeadLike:
        return fetch(self.process, f"head {self.number}")
