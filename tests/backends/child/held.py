"""Hidden states and heads by their names: held in the child, fetched by their readers.

The child holds states for as long as the parent does: when a name is collected in the parent, the parent reports it with its next
question.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from practicum.costs import MeteredHead
from practicum.types import HeadLike, TeacherSignal

HELD: dict[str, Any] = {}
"""In the child: the objects by name."""

ASK: dict[int, Callable[[str], Any]] = {}
"""In the parent: functions that fetch an object by name, by the child's process."""

DROPPED: defaultdict[int, list[str]] = defaultdict(list)
"""In the parent: the names of states that are no longer referenced, by the child's process."""


def fetch(process: int, name: str) -> Any:
    """Return the object of a name, in either process."""
    return HELD[name] if process == os.getpid() else ASK[process](name)


def take_dropped(process: int) -> list[str]:
    """Return each name that the child may release, once; more names may be dropped meanwhile."""
    names = DROPPED[process]
    return [names.pop() for _ in range(len(names))]


@dataclass(frozen=True)
class ChildStates:
    """A handle of hidden states, see `practicum.types.StatesLike`; one per name in the parent, one per message in the child."""

    process: int
    name: str
    length: int
    finite: bool

    def __len__(self) -> int:
        return self.length

    def __del__(self) -> None:
        if self.process in ASK:
            DROPPED[self.process].append(self.name)

    def fetch(self) -> Tensor:
        return fetch(self.process, self.name)


@dataclass(frozen=True)
class ChildHead:
    """A handle of a head, see `practicum.types.HeadLike`."""

    process: int
    number: int
    vocab_size: int

    @property
    def key(self) -> tuple[int, ...]:
        return self.process, self.number, self.vocab_size

    def logprobs(self, hidden: Tensor) -> Tensor:
        return self.fetch().logprobs(hidden)

    def logits(self, hidden: Tensor, room: Callable[[], Tensor] | None = None) -> Tensor:
        return self.fetch().logits(hidden, room)

    def release(self) -> None:
        """Do nothing: the head is fetched each time."""

    def fetch(self) -> HeadLike:
        return fetch(self.process, f"head {self.number}")


def bring(signal: TeacherSignal, process: int) -> TeacherSignal:
    """Return the signal as the child `process` can read it: with the states and heads of other children fetched."""
    states, head, pool = signal.hidden, signal.head, signal.pool
    if isinstance(states, ChildStates) and states.process != process:
        states = states.fetch()
    bare = head.bare if isinstance(head, MeteredHead) else head
    if isinstance(bare, ChildHead) and bare.process != process:
        bare = bare.fetch()
        head = (
            MeteredHead(bare, head.name, lambda tokens: None)
            if isinstance(head, MeteredHead)
            else bare
        )
    if pool is not None:
        pool = replace(pool, members=tuple(bring(member, process) for member in pool.members))
    return replace(signal, hidden=states, head=head, pool=pool)
