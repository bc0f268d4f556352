"""The port of a model's end: the last norm and the head, for states computed by a remote body."""

from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from practicum.types import HeadLike


class ModelEnding(Protocol):
    """The last norm and the head of a model; a backend reads both from the model's folder."""

    @property
    def head(self) -> HeadLike:
        """The head, with the model's scale, cap and bias."""
        ...

    @property
    def width(self) -> int:
        """The width of the hidden states."""
        ...

    @property
    def source(self) -> str:
        """The folder or name of the weights."""
        ...

    def finish(self, stream: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
        """Return the inputs of the head, from the outputs of the last layer."""
        ...
