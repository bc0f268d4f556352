"""The port of a dry run: models with dimensions and no weights, and a record of their requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from practicum.costs import Footprint, GraphPlan, ModelDims, TrainableDims
from practicum.models.config import ScorerConfig
from practicum.ports import Backend
from practicum.types import Datum, SampleRequest, ScoreRequest


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A weightless model that scores."""

    config: ScorerConfig | None
    """Its settings; None: the student's own weights."""
    shape: ModelDims
    body: Footprint
    """The activation memory of a pass through its layers."""
    held: int = 0
    """The number of weights that are copied because they follow the student's."""


@dataclass(frozen=True, slots=True)
class PaperRecord:
    """The memory figures of a weightless backend, and the requests of one step by model name."""

    shape: ModelDims
    learning: TrainableDims
    body: Callable[[bool], Footprint]
    """Return the memory of a pass through the student, with activation checkpointing or without."""
    cut: Callable[[Sequence[Datum]], GraphPlan]
    """Split the datums of an update into micro-batches."""
    packs_up_to: int
    """The longest text, in tokens, that the student runs packed."""
    scored_tokens: int
    """The tokens of a scoring pass."""
    prepares_head_from: int
    """The head is prepacked for products of so many rows or more."""
    prepares_weights_from: int
    """All weights are prepacked for completions of so many tokens or more."""
    chunk_tokens: int
    sampling_batch: int
    scorers: dict[str, PaperModel] = field(default_factory=dict)
    drawn: dict[str, list[SampleRequest]] = field(default_factory=dict)
    scored: dict[str, list[ScoreRequest]] = field(default_factory=dict)
    data: list[Datum] = field(default_factory=list)


class PaperBackend(Backend, Protocol):
    """A backend of weightless models; `record` exists after the student is loaded."""

    record: PaperRecord
