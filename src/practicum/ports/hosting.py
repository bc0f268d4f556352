"""The requests of a service to the models that it holds: draws, scores of prompts, and gradients of losses of given tokens."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor

from practicum.models.config import Lora
from practicum.ports import AdamParams
from practicum.text import Renderer
from practicum.types import Metrics, Sample, SampleRequest, SamplingParams

Weights = Mapping[str, Tensor] | None
"""Weights that stand in for those of the modules, by name; None: none do."""

Loss = Callable[[Float[Tensor, "n K"], slice], Float[Tensor, "n K"]]
"""From the log-probabilities of some positions' targets, and which positions they are, to one loss a target."""


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """One text: the N tokens that are read, K target tokens at each position, and the loss of their log-probabilities.

    With `whole` the loss is only ever asked for all positions at once, because that of one depends on the others.
    """

    tokens: tuple[int, ...]
    targets: Int[Tensor, "N K"]
    loss: Loss
    whole: bool = False


@dataclass(frozen=True, slots=True)
class GivenResult:
    """The learner's [N, K] log-probabilities of each text's targets, and the sum of each text's loss.

    N and K are each text's own. `supervises` is whether the loss has a gradient at any target: not where every weight or
    advantage is 0.
    """

    logprobs: list[Float[Tensor, "_ _"]]
    losses: list[float]
    supervises: bool


@dataclass(frozen=True, slots=True)
class PromptQuestion:
    """Questions about N tokens; row r of an answer is about token `first + r`, for which `first` at least 1.

    `targets` are K token ids a row, -1 where nothing is asked. `draws` tokens are drawn a row at `temperature`, and
    `following` are how many first tokens after the text are drawn under `params`, one for each of its seeds.
    """

    tokens: tuple[int, ...]
    first: int = 1
    topk: int = 0
    targets: Int[Tensor, "T K"] | None = None
    draws: int = 0
    temperature: float = 1.0
    seed: int = 0
    following: tuple[int, ...] = ()
    params: SamplingParams | None = None

    @property
    def rows(self) -> int:
        """Count the tokens that are scored."""
        return len(self.tokens) - self.first


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The answer, a row a token: log-probabilities of the model itself, whatever the temperature of the draws."""

    logprobs: Float[Tensor, " T"]
    topk_ids: Int[Tensor, "T k"]
    topk_logprobs: Float[Tensor, "T k"]
    target_logprobs: Float[Tensor, "T K"] | None
    drawn: Int[Tensor, "T D"]
    drawn_logprobs: Float[Tensor, "T D"]
    following: list[Sample]


class Reader(Protocol):
    """A model that draws and scores, under weights that are given with each call."""

    def draw(
        self, requests: Sequence[SampleRequest], params: SamplingParams, weights: Weights
    ) -> Generator[None, None, list[Sample]]:
        """Draw one completion a request, with a pause after each token in which other work can be done."""
        ...

    def score(self, questions: Sequence[PromptQuestion], weights: Weights) -> list[PromptScores]:
        """Answer questions about prompts, one answer a question."""
        ...

    def bring(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights where the model is."""
        ...


class Adapters(Protocol):
    """Adapters over a held model, with their optimizer and what has been accumulated."""

    def forward(self, data: Sequence[GivenTokens]) -> GivenResult:
        """Return the log-probabilities and losses of given tokens, without a gradient."""
        ...

    def forward_backward(self, data: Sequence[GivenTokens], seed: int) -> GivenResult:
        """Add the gradient of the summed loss to what has been accumulated; dropout is seeded by `seed`.

        Raises NumericError where a loss is not a number.
        """
        ...

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take one step of AdamW on what has been accumulated, and forget it."""
        ...

    def save_state(self) -> dict[str, dict[str, Tensor]]:
        """Return weights under `student` and moments under `optimizer`: live views, not copies."""
        ...

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore what `save_state` gave."""
        ...

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Return the accumulated gradients, by the names of the weights."""
        ...

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Take these in place of the accumulated gradients."""
        ...

    def reader(self) -> Reader:
        """Return the modules with these adapters as a reader."""
        ...


class Hosted(Protocol):
    """A base model that a service holds."""

    source: str
    """The folder or hub name that its weights were read from."""
    renderer: Renderer
    context_length: int
    vocab_size: int
    architecture: str
    size: int
    """Bytes of its weights."""

    def reader(self) -> Reader:
        """Return the model itself as a reader."""
        ...

    def adapt(self, lora: Lora, seed: int, parts: tuple[str, ...]) -> Adapters:
        """Make new adapters over it, seeded by `seed`, around the named halves of the layers."""
        ...
