"""The states of a drafter's target for whole texts: computed, or read from files.

A file has the layout of vLLM's connector (ExampleHiddenStatesConnector) and of Speculators
(scripts/data_generation_offline.py): `token_ids` [tokens] and `hidden_states` [tokens, layers,
width]. The last of the layers is the target's last one, before the norm.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from practicum.backends.local.ending import find_norm
from practicum.backends.local.language_model import LanguageModel, record_layers
from practicum.backends.local.newest import NewestEntries
from practicum.backends.local.self_teacher import LocalSelfTeacher
from practicum.backends.local.text_states import identify_weights
from practicum.errors import ModelError
from practicum.models.files import name_when_complete
from practicum.objective import Signal
from practicum.types import ScoreRequest, TeacherSignal, TextStates

MAX_BYTES = 256 * 2**20
"""The maximum bytes of states that are kept in memory for the next epochs of a step."""

MAX_ERROR = {True: 1e-3, False: 0.05}
"""The largest relative error of stored states, as the mean over tokens, by whether they are exact."""


class TargetStates:
    """The states of texts after some `layers` of the target, and after its last one.

    Each text is computed by itself, so its states do not depend on other texts. With a `folder`,
    they are read from it, or written to it. Raises ModelError if the folder's first file is not
    about this target, so that states of two targets do not mix.
    """

    def __init__(self, model: LanguageModel, layers: Sequence[int], folder: Path | None) -> None:
        config = model.model.config.get_text_config()
        self._model, self._folder, self._width = model, folder, config.hidden_size
        self._layers = (*layers, config.num_hidden_layers)
        self._norm = find_norm(model.model, model.model.name_or_path or "")
        self._recent = NewestEntries[str, Tensor](MAX_BYTES)

    def read(self, text: Sequence[int], *, stores: bool = True) -> Float[Tensor, "L N D"]:
        """Return the states of each token; if it `stores`, the folder has them afterwards."""
        name = _name_text(text)
        if (path := self._files.get(name)) is not None:
            return self._load(path)[1].to(self._model.device)
        if (states := self._recent.get(name)) is None:
            states = self._compute(text)
            self._recent.put(name, states, states.nbytes)
        if stores and self._folder is not None:
            path = self._folder / f"{name}.safetensors"
            with name_when_complete(path) as staging:
                tensors = {"token_ids": torch.tensor(text), "hidden_states": states.cpu()}
                save_file(tensors, staging)
            self._files[path.stem] = path
        return states

    @torch.no_grad()
    def finish(self, states: Float[Tensor, "t N D"]) -> Float[Tensor, "t D"]:
        """Return what the target's head reads."""
        last = states[:, -1]
        return last if self._norm is None else self._norm(last)

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The files by the names of their texts."""
        if self._folder is None:
            return {}
        files = dict[str, Path]()
        for path in sorted(self._folder.glob("*.safetensors")):
            text, numbers = self._load(path, reads=not files)
            if not files:
                states = self._compute(text).float()
                errors = (numbers.to(states) - states).norm(dim=-1) / states.norm(dim=-1)
                if not (error := errors.mean(dim=0).max()) <= MAX_ERROR[self._model.is_exact]:
                    raise self._refuse(path, f"differ from its own by {error:.2g} of their size")
            files[_name_text(text)] = path
        return files

    @torch.no_grad()
    def _compute(self, text: Sequence[int]) -> Float[Tensor, "L N D"]:
        ids = torch.tensor([list(text)], device=self._model.device)
        with record_layers(self._model, self._layers) as states:
            self._model.body(ids, torch.ones_like(ids, dtype=torch.bool))
        return torch.stack(states, dim=2)[0]

    def _load(self, path: Path, *, reads: bool = True) -> tuple[list[int], Tensor]:
        """Return the text of a file, and its states if `reads`. Raises ModelError."""
        dtype = self._model.model.dtype
        try:
            with safe_open(path, framework="pt") as file:
                text = file.get_tensor("token_ids").tolist()
                shape = file.get_slice("hidden_states").get_shape()
                states = file.get_tensor("hidden_states") if reads else torch.empty(0, dtype=dtype)
        except (OSError, SafetensorError) as error:
            raise self._refuse(path, f"cannot be read ({error})") from error
        expected = [len(text), len(self._layers), self._width]
        if shape != expected or states.dtype != dtype or not torch.isfinite(states).all():
            raise self._refuse(path, f"are {states.dtype} {shape} instead of {dtype} {expected}")
        return text, states

    def _refuse(self, path: Path, problem: str) -> ModelError:
        return ModelError(
            f"student.drafter.cache: {path} is not about this target after layers "
            f"{list(self._layers)}: the states {problem}; set another folder, or the model, layers "
            "and dtype of these states"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTeacher(LocalSelfTeacher):
    """The target as the teacher of its drafter: both read the same states, computed once."""

    states: TargetStates

    def score(self, requests: Sequence[ScoreRequest], signal: Signal) -> list[TeacherSignal]:
        """Return the target's distributions."""
        requests = [replace(request, states=self._recall(request)) for request in requests]
        return super(DraftTeacher, self).score(requests, signal)

    def _recall(self, request: ScoreRequest) -> TextStates:
        text, start = (*request.prompt_tokens, *request.tokens), len(request.prompt_tokens) - 1
        states = self.states.read(text, stores=False)[start : len(text) - 1]
        hidden = self.states.finish(states)
        return TextStates(text, *identify_weights(self.language_model), hidden, None)


def _name_text(text: Sequence[int]) -> str:
    return hashlib.sha256(array("q", text).tobytes()).hexdigest()
