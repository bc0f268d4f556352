"""Keep the states that a model computes while it writes texts, so that later passes can reuse them.

An evaluation scores answers that the student has just written, so the hidden states that predicted
their tokens are known. A student that trains only its last layers learns from answers that it wrote
in the same step, and the layers below have not changed since then.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.backends.local.language_model import (
    Decoding,
    LanguageModel,
    find_layers,
    patch_forwards,
)
from practicum.types import SampleRequest, SamplingParams, ScoreRequest, TextStates

MAX_BYTES = 64 * 2**20
"""The maximum bytes of states per sampling call; a call that could need more keeps none."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The states of its texts that a sampling call keeps.

    `hidden` keeps the states that predict tokens. `lower_layers` keeps the states of all tokens
    after this number of layers; 0 keeps none.
    """

    hidden: bool = False
    lower_layers: int = 0

    @property
    def is_empty(self) -> bool:
        """True if nothing is kept."""
        return not self.hidden and not self.lower_layers

    @classmethod
    def plan(
        cls,
        language_model: LanguageModel,
        requests: Sequence[SampleRequest],
        params: SamplingParams,
        *,
        learns: bool,
    ) -> "Recording":
        """Plan the states that are worth keeping and fit; with `learns`, an update may follow."""
        if not language_model.is_exact or language_model.device.type != "cpu":
            return cls()
        # Only one is needed: the student does not learn from an evaluation's answers.
        if params.rescored:
            planned, prompt_tokens = cls(hidden=True), 0
        else:
            is_native = language_model.decoding is Decoding.NATIVE
            planned = cls(
                lower_layers=count_frozen_layers(language_model) if learns and is_native else 0
            )
            prompt_tokens = sum(len(request.prompt_tokens) for request in requests)
        width = language_model.model.config.get_text_config().hidden_size
        tokens = prompt_tokens + len(requests) * params.max_new_tokens
        return planned if 4 * width * tokens <= MAX_BYTES else cls()


class StateRecorder:
    """Collect the states of texts that are decoded together; texts are numbered from 0."""

    def __init__(self, language_model: LanguageModel, recording: Recording) -> None:
        self.recording = recording
        self._model = language_model
        self._hidden: dict[int, list[Tensor]] = {}
        self._lower: dict[int, list[Tensor]] = {}

    def add_prompt(
        self, text: int, last_hidden: Float[Tensor, " D"], lower: Float[Tensor, "P D"] | None
    ) -> None:
        """Keep a prompt's last hidden state, and its states between the layers."""
        if self.recording.hidden:
            self._hidden[text] = [last_hidden[None]]
        if lower is not None:
            self._lower[text] = [lower]

    def add_step(
        self,
        texts: Sequence[int],
        hidden: Float[Tensor, "B D"],
        lower: Float[Tensor, "B D"] | None,
    ) -> None:
        """Keep the states of one more token of each text."""
        for row, text in enumerate(texts):
            if self.recording.hidden:
                self._hidden[text].append(hidden[row : row + 1])
            if lower is not None:
                self._lower[text].append(lower[row : row + 1])

    def take(self, text: int, tokens: tuple[int, ...]) -> TextStates | None:
        """Return the states of a finished text, and drop them here."""
        hidden, lower = (states.pop(text, None) for states in (self._hidden, self._lower))
        if hidden is None and lower is None:
            return None
        return TextStates(
            tokens,
            *identify_weights(self._model),
            None if hidden is None else torch.cat(hidden),
            None if lower is None else torch.cat(lower),
        )


def identify_weights(language_model: LanguageModel) -> tuple[int, int]:
    """Return the model's identity, and a number that in-place changes of weights increase."""
    model = language_model.model
    return id(model), sum(parameter._version for parameter in model.parameters())


def count_frozen_layers(language_model: LanguageModel) -> int:
    """Return the number of layers below the first trained layer of a Llama-like model.

    This is 0 if the embedding is trained too, or if nothing is trained.
    """
    embedding = language_model.model.get_input_embeddings().weight
    if embedding.requires_grad or not language_model.trainable_parameters():
        return 0
    layers = find_layers(language_model.model) or ()
    learns = [any(weight.requires_grad for weight in layer.parameters()) for layer in layers]
    # Above the layers there are only the last norm and the head.
    return learns.index(True) if True in learns else len(learns)


def find_hidden(language_model: LanguageModel, text: ScoreRequest) -> Float[Tensor, "T D"] | None:
    """Return the states that predict the text's tokens, if the current weights computed them."""
    states = text.states
    if states is None or not _is_about(states, text):
        return None
    is_current = (states.model, states.version) == identify_weights(language_model)
    return states.hidden if is_current else None


def skip_lower_layers(
    language_model: LanguageModel,
    texts: Sequence[ScoreRequest],
    places: Callable[[], Sequence[Int[Tensor, " L"]]],
) -> AbstractContextManager[None]:
    """Let a packed pass start above the frozen layers, if the states of all texts there are kept.

    `places` returns the row positions of each text's tokens.
    """
    recorded = [
        text.states.lower
        for text in texts
        if text.states is not None
        and text.states.lower is not None
        and text.states.model == id(language_model.model)
        and _is_about(text.states, text)
    ]
    count = count_frozen_layers(language_model) if len(recorded) == len(texts) else 0
    layers = find_layers(language_model.model)
    if not count or layers is None:
        return nullcontext()
    indices = places()
    length = 1 + max(int(positions.max()) for positions in indices)
    row = recorded[0].new_empty(length, recorded[0].shape[1])
    for positions, states in zip(indices, recorded, strict=True):
        row[positions] = states
    below = dict.fromkeys(layers[: count - 1], _pass_on)
    return patch_forwards({**below, layers[count - 1]: lambda *_, **__: row[None]})


def _pass_on(states: Tensor, *_: Any, **__: Any) -> Tensor:
    return states


def _is_about(states: TextStates, text: ScoreRequest) -> bool:
    # An answer may have been truncated or completed since it was written.
    return states.text == (*text.prompt_tokens, *text.tokens)
