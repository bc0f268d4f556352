"""The port between a service and the models that it holds: sampling, prompt scores, gradients."""

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
"""Weights by name that replace the modules' own during a call; None: no replacement."""

Loss = Callable[[Float[Tensor, "n K"], slice], Float[Tensor, "n K"]]
"""Maps the targets' log-probabilities at a slice of positions to one loss per target."""


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """One text: N input tokens, K target tokens at each position, and a loss of the targets."""

    tokens: tuple[int, ...]
    targets: Int[Tensor, "N K"]
    loss: Loss
    needs_all_positions: bool = False
    """True if the loss at one position depends on others and so needs all positions at once."""


@dataclass(frozen=True, slots=True)
class GivenResult:
    """The student's log-probabilities of each text's targets, and each text's loss."""

    logprobs: list[Float[Tensor, "_ _"]]
    """[N, K] for each text, with its own N and K."""
    losses: list[float]
    """The summed loss of each text."""
    supervises: bool
    """True if any target has a gradient; False if every weight or advantage is 0."""


@dataclass(frozen=True, slots=True)
class PromptQuestion:
    """A request for scores of N prompt tokens; row r of the result scores token `first + r`."""

    tokens: tuple[int, ...]
    first: int = 1
    """The index of the first scored token, at least 1."""
    topk: int = 0
    targets: Int[Tensor, "T K"] | None = None
    """K token ids per row to score; -1: none."""
    draws: int = 0
    """The number of tokens to sample per row, at `temperature`."""
    temperature: float = 1.0
    seed: int = 0
    following: tuple[int, ...] = ()
    """Seeds; for each seed, one token after the text is sampled under `params`."""
    params: SamplingParams | None = None

    @property
    def rows(self) -> int:
        """Count the tokens that are scored."""
        return len(self.tokens) - self.first


@dataclass(frozen=True, slots=True)
class PromptScores:
    """The scores of a prompt, one row per token; log-probabilities are at temperature 1."""

    logprobs: Float[Tensor, " T"]
    topk_ids: Int[Tensor, "T k"]
    topk_logprobs: Float[Tensor, "T k"]
    target_logprobs: Float[Tensor, "T K"] | None
    drawn: Int[Tensor, "T D"]
    drawn_logprobs: Float[Tensor, "T D"]
    following: list[Sample]


class Reader(Protocol):
    """A model that samples and scores under weights passed with each call."""

    def draw(
        self, requests: Sequence[SampleRequest], params: SamplingParams, weights: Weights
    ) -> Generator[None, None, list[Sample]]:
        """Sample one completion per request; yield after each token and prefill, so that others can work."""
        ...

    def score(
        self, questions: Sequence[PromptQuestion], weights: Weights
    ) -> Generator[None, None, list[PromptScores]]:
        """Score prompts, one result per request; yield after each pass, so that others can work."""
        ...

    def bring(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights on the model's device."""
        ...


class Adapters(Protocol):
    """Adapters of a hosted model, with their optimizer and their accumulated gradient."""

    def forward(self, data: Sequence[GivenTokens]) -> GivenResult:
        """Return the log-probabilities and losses of the targets, without a gradient."""
        ...

    def forward_backward(self, data: Sequence[GivenTokens], seed: int) -> GivenResult:
        """Accumulate the gradient of the summed loss; `seed` seeds dropout.

        Raises NumericError if a loss is not a number.
        """
        ...

    def optim_step(self, params: AdamParams) -> Metrics:
        """Take one AdamW step with the accumulated gradient, and clear it."""
        ...

    def save_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the weights under `student` and the moments under `optimizer`, without copying."""
        ...

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the tensors that `save_state` returned."""
        ...

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients by weight name."""
        ...

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace the accumulated gradients."""
        ...

    def build_reader(self) -> Reader:
        """Return the modules with these adapters as a reader."""
        ...


class Hosted(Protocol):
    """A base model that a service holds."""

    source: str
    """The folder or hub name of its weights."""
    renderer: Renderer
    context_length: int
    vocab_size: int
    architecture: str
    size: int
    """The size of its weights in bytes."""

    def build_reader(self) -> Reader:
        """Return the model itself as a reader."""
        ...

    def adapt(self, lora: Lora, seed: int, parts: tuple[str, ...]) -> Adapters:
        """Build new adapters, seeded by `seed`; `parts` names the halves of the layers to adapt."""
        ...
