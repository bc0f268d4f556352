"""A backend on paper: its models have sizes and no weights, and it records what a step asks of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from practicum.costs import Footprint, GraphPlan, ModelDims, TrainableDims
from practicum.models.config import ScorerConfig
from practicum.ports import Backend
from practicum.types import Datum, SampleRequest, ScoreRequest


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model on paper that scores: its settings (None: the student's own weights), its sizes, and what a pass through it takes.

    `held` are the numbers that are held a second time, for weights that follow the student's.
    """

    config: ScorerConfig | None
    shape: ModelDims
    body: Footprint
    held: int = 0


@dataclass(frozen=True, slots=True)
class PaperRecord:
    """What a step on paper asked of each model, by name, and what the backend says about memory.

    `body` is what a pass through the student takes, with its layers recomputed or not, and `cut` how an update of some data is
    cut into passes. A scoring pass holds `scored_tokens`. The head is laid out anew for products of `prepares_head_from` rows
    or more, and all weights for `prepares_weights_from` tokens of an answer or more.
    """

    shape: ModelDims
    learning: TrainableDims
    body: Callable[[bool], Footprint]
    cut: Callable[[Sequence[Datum]], GraphPlan]
    packs_up_to: int
    scored_tokens: int
    prepares_head_from: int
    prepares_weights_from: int
    chunk_tokens: int
    sampling_batch: int
    scorers: dict[str, PaperModel] = field(default_factory=dict)
    drawn: dict[str, list[SampleRequest]] = field(default_factory=dict)
    scored: dict[str, list[ScoreRequest]] = field(default_factory=dict)
    data: list[Datum] = field(default_factory=list)


class PaperBackend(Backend, Protocol):
    """A backend whose models have sizes and no weights; `record` is there once the student is."""

    record: PaperRecord
