"""Tensors of other processes by reference: they go from where they are computed to their reader.

The object store of Ray holds them as arrays, so a reader on the same machine maps them without a
copy. The driver hands references on and reads none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.head import Head
from practicum.types import HeadLike, ScoreRequest, TeacherSignal

FETCH_SECONDS = 600.0
"""The time after which a reader gives up; an array that can no longer be fetched fails at once."""


class ReaderDevice:
    """The device on which this process reads what it fetches."""

    device = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as an array, which the object store maps; numpy has no bfloat16."""

    array: np.ndarray
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> "PackedTensor":
        """Pack a tensor of any dtype."""
        plain = tensor.detach().cpu().contiguous()
        bits = plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain
        return cls(bits.numpy(), plain.dtype)

    def to_tensor(self, rows: slice = slice(None)) -> Tensor:
        """Copy rows of the tensor: the object store's memory is read-only."""
        return torch.from_numpy(self.array[rows].copy()).view(self.dtype)


def fetch(reference: Any) -> Any:
    """Return an object of the object store, from whichever machine has it."""
    return ray.get(reference, timeout=FETCH_SECONDS)


@dataclass(frozen=True, slots=True)
class RayStates:
    """Some rows of an array of hidden states; see `practicum.types.StatesLike`."""

    reference: Any
    first: int
    length: int
    finite: bool

    def __len__(self) -> int:
        return self.length

    def fetch(self) -> Float[Tensor, "T D"]:
        """Copy the rows to the device on which this process reads."""
        rows = slice(self.first, self.first + self.length)
        return fetch(self.reference).to_tensor(rows).to(ReaderDevice.device)


@dataclass(frozen=True, slots=True)
class PackedHead:
    """A head as arrays."""

    weight: PackedTensor
    bias: PackedTensor | None
    settings: Mapping[str, Any]

    @classmethod
    def from_head(cls, head: Head) -> "PackedHead":
        """Pack the rows of the real tokens."""
        count = head.vocab_size
        bias = None if head.bias is None else PackedTensor.from_tensor(head.bias[:count])
        settings = {"vocab_size": count, "scale": head.scale, "softcap": head.softcap}
        # Products of a head under autocast take the rounded copy.
        return cls(PackedTensor.from_tensor(head.rows), bias, settings)

    def to_head(self) -> Head:
        """Return the head on the device on which this process reads."""
        device = ReaderDevice.device
        bias = None if self.bias is None else self.bias.to_tensor().to(device)
        return Head(self.weight.to_tensor().to(device), bias=bias, **self.settings)


_heads: dict[int, Head] = {}
"""The heads that this process has fetched, by their numbers."""


@dataclass(frozen=True, slots=True)
class RayHead:
    """A head that a process fetches when it reads hidden states; see `practicum.types.HeadLike`."""

    reference: Any
    number: int
    vocab_size: int

    @property
    def key(self) -> tuple[int, ...]:
        """The number of the head, which no other head of the run has."""
        return self.number, self.vocab_size

    def logprobs(self, hidden: Float[Tensor, "*s D"]) -> Float[Tensor, "*s v"]:
        """Return the log-probabilities of all tokens; fetches the weights if needed."""
        return self._open().logprobs(hidden)

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """Return the logits; fetches the weights if needed."""
        return self._open().logits(hidden, room)

    def release(self) -> None:
        """Free the weights until they are needed again."""
        _heads.pop(self.number, None)

    def _open(self) -> Head:
        if self.number not in _heads:
            _heads[self.number] = fetch(self.reference).to_head()
        return _heads[self.number]


@dataclass(frozen=True, slots=True)
class WeightsReference:
    """The trainable weights at one time: a number, and the parts that the ranks gathered.

    `size` is that of all parts in bytes.
    """

    number: int
    references: tuple[Any, ...]
    size: int = 0

    def fetch(self) -> dict[str, PackedTensor]:
        """Fetch all parts."""
        parts = [fetch(reference) for reference in self.references]
        return {name: tensor for part in parts for name, tensor in part.items()}


PackedAnswers = tuple[int, list[tuple[TeacherSignal, bool]]]
"""The bytes of all hidden states, and the signals without them; True says that they are finite."""


def pack_signals(signals: Sequence[TeacherSignal]) -> tuple[PackedAnswers, PackedTensor | None]:
    """Pack signals for another process: what is small, and the hidden states of all of them."""
    states = [signal.states for signal in signals]
    answers = [
        (
            replace(signal, hidden=None, head=None),
            True if state is None else bool(torch.isfinite(state).all()),
        )
        for signal, state in zip(signals, states, strict=True)
    ]
    present = [state for state in states if state is not None]
    if not present:
        return (0, answers), None
    packed = PackedTensor.from_tensor(torch.cat(present))
    return (packed.array.nbytes, answers), packed


def open_signals(
    answers: PackedAnswers,
    states: Any,
    requests: Sequence[ScoreRequest],
    find_head: Callable[[], HeadLike],
) -> Iterator[TeacherSignal]:
    """Yield the signals of `pack_signals` with their states, whose array is referred to."""
    first = 0
    for (answer, finite), request in zip(answers[1], requests, strict=True):
        length = len(request.tokens)
        if answer.is_empty:
            hidden = RayStates(states, first, length, finite)
            answer = replace(answer, hidden=hidden, head=find_head())
        yield answer
        first += length
