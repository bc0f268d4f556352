"""Refer to tensors of other processes, which go directly from their producer to their reader.

The object store of Ray holds them as arrays, so a reader on the same machine maps them without a
copy. The driver passes references on and does not read them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import ray
import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.head import Head
from practicum.models.tensors import SavedTensor, write_tensors
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

    def to_tensor(self, rows: slice | EllipsisType = ...) -> Tensor:
        """Copy rows of the tensor: the object store's memory is read-only."""
        return torch.from_numpy(self.array[rows].copy()).view(self.dtype)


def fetch(reference: Any) -> Any:
    """Return an object of the object store, from any machine that has it."""
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
        # Products of a head under autocast use the rounded copy.
        return cls(PackedTensor.from_tensor(head.rows), bias, settings)

    def to_head(self) -> Head:
        """Return the head on the device on which this process reads."""
        device = ReaderDevice.device
        bias = None if self.bias is None else self.bias.to_tensor().to(device)
        return Head(self.weight.to_tensor().to(device), bias=bias, **self.settings)


_heads: dict[int, Head] = {}
"""The heads that this process has fetched, by number."""


@dataclass(frozen=True, slots=True)
class RayHead:
    """A head that a process fetches when it reads hidden states; see `practicum.types.HeadLike`."""

    reference: Any
    number: int
    vocab_size: int

    @property
    def key(self) -> tuple[int, ...]:
        """The number of the head, which is unique in the run."""
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

    `sizes` are the bytes of the tensors of each part.
    """

    number: int
    references: tuple[Any, ...]
    sizes: tuple[Mapping[str, int], ...] = ()

    @property
    def size(self) -> int:
        """The bytes of all parts."""
        return sum(sum(part.values()) for part in self.sizes)

    def fetch(self) -> dict[str, PackedTensor]:
        """Fetch all parts."""
        parts = [fetch(reference) for reference in self.references]
        return {name: tensor for part in parts for name, tensor in part.items()}


PackedState = dict[str, PackedTensor]
"""Tensors by name, as one object of the object store."""


def pack_state(tensors: Mapping[str, Tensor]) -> tuple[dict[str, int], PackedState]:
    """Pack tensors for another process; return their sizes in bytes and the tensors."""
    packed = {name: PackedTensor.from_tensor(tensor) for name, tensor in tensors.items()}
    return {name: tensor.array.nbytes for name, tensor in packed.items()}, packed


@dataclass(frozen=True, slots=True)
class RayTensor:
    """A tensor of a packed state; see `practicum.models.tensors.TensorElsewhere`."""

    reference: Any
    name: str
    nbytes: int

    def write_file(self, path: Path, named: Mapping[str, SavedTensor]) -> None:
        """Let a Ray process write the file, on the file system that all machines share."""
        # A new process is started for this; it needs no GPU and does not wait for other work.
        writer = ray.remote(num_cpus=0)(write_packed)
        ray.get(writer.remote(path.absolute(), dict(named)), timeout=FETCH_SECONDS)


def refer_to_state(sizes: Mapping[str, int], reference: Any) -> dict[str, RayTensor]:
    """Return the tensors of a packed state by reference."""
    return {name: RayTensor(reference, name, size) for name, size in sizes.items()}


def write_packed(path: Path, named: Mapping[str, SavedTensor]) -> None:
    """Write tensors into a file; fetch tensors of other processes first."""
    states: dict[Any, PackedState] = {}
    tensors: dict[str, SavedTensor] = dict(named)
    for name, tensor in named.items():
        if isinstance(tensor, RayTensor):
            if tensor.reference not in states:
                states[tensor.reference] = fetch(tensor.reference)
            tensors[name] = states[tensor.reference][tensor.name].to_tensor()
    write_tensors(path, tensors)


PackedAnswers = tuple[int, list[tuple[TeacherSignal, bool]]]
"""The bytes of all hidden states, the signals without states, and True if the states are finite."""


def pack_signals(signals: Sequence[TeacherSignal]) -> tuple[PackedAnswers, PackedTensor | None]:
    """Pack signals for another process: the small parts, and the hidden states of all signals."""
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
    """Yield the signals of `pack_signals` with references to their states."""
    first = 0
    for (answer, finite), request in zip(answers[1], requests, strict=True):
        length = len(request.tokens)
        if answer.is_empty:
            hidden = RayStates(states, first, length, finite)
            answer = replace(answer, hidden=hidden, head=find_head())
        yield answer
        first += length
