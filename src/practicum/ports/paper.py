"""The port of a dry run: models with dimensions and no weights, and a record of their requests."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from practicum.costs import Footprint, GraphPlan, ModelDims, TrainableDims
from practicum.models.config import DtypeName, ScorerConfig, StudentConfig
from practicum.objective import Objective
from practicum.ports import Backend
from practicum.types import Datum, SampleRequest, SamplingParams, ScoreRequest


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A weightless model that scores."""

    config: ScorerConfig | None
    """Its settings; None: the student's own weights."""
    dims: ModelDims
    body: Footprint
    """The activation memory of a pass through its layers."""
    num_copied_weights: int = 0
    """The number of weights that are copied because they follow the student's."""
    layout_bytes: int = 0
    """The bytes of its weights that are stored a second time, in the processor's layout."""


@dataclass(frozen=True, slots=True)
class PaperScalarDims:
    """Sizes of a weightless model with one output number per token, trained next to the student."""

    config: StudentConfig
    dims: ModelDims
    trainable_dims: TrainableDims
    body: Footprint
    """The activation memory of a pass through its layers."""


@dataclass(frozen=True, slots=True)
class PaperRecord:
    """The memory figures of a weightless backend, and the requests of one step by model name."""

    dims: ModelDims
    trainable_dims: TrainableDims
    dtype: DtypeName
    """The dtype of the student's products."""
    body: Callable[[bool], Footprint]
    """Return the memory of a pass through the student, with activation checkpointing or without."""
    cut: Callable[[Sequence[Datum]], GraphPlan]
    """Split the datums of an update into micro-batches."""
    measure_sampling: Callable[[Sequence[tuple[int, ...]], int, SamplingParams], Mapping[str, int]]
    """Return the bytes on a GPU, by item, of completions of these prompts with this many tokens."""
    measure_loss: Callable[[Objective, int], tuple[int, int]]
    """Return the bytes on a GPU that a chunk of this many tokens leaves, and its peak."""
    max_packed_tokens: int
    """The longest text, in tokens, that the student runs packed."""
    scored_tokens: int
    """The tokens of a scoring pass."""
    min_head_rows: int
    """The fewest rows of a product for which the head is prepacked."""
    min_prepack_tokens: int
    """The fewest tokens of a completion for which all weights are prepacked."""
    max_kept_bytes: int
    """The most bytes of prepacked frozen weights that are kept between steps."""
    chunk_tokens: int
    sampling_batch: int
    scorers: dict[str, PaperModel] = field(default_factory=dict)
    scalars: dict[str, PaperScalarDims] = field(default_factory=dict)
    sample_requests: dict[str, list[SampleRequest]] = field(default_factory=dict)
    score_requests: dict[str, list[ScoreRequest]] = field(default_factory=dict)
    scalar_calls: dict[str, list[tuple[str, Sequence[ScoreRequest]]]] = field(default_factory=dict)
    """Calls of models with one output number per token: `predict` or `fit`, and their texts."""
    datums: list[Datum] = field(default_factory=list)
    max_text_bytes: int = 0
    """The most bytes of keys and values of conversations that are kept between turns."""
    max_hidden_bytes: int = sys.maxsize
    """The most bytes of a scorer's hidden states that stay on the device until the update."""


class PaperBackend(Backend):
    """A backend of weightless models; `record` exists after the student is loaded."""

    record: PaperRecord
