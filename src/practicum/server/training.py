"""A training model: adapters over a served base model, with the optimizer's moments and what has been accumulated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.errors import DataError
from practicum.functional import POLICY_LOSSES, PolicyLoss
from practicum.models.config import Lora
from practicum.ports import AdamParams
from practicum.ports.hosting import Adapters, GivenResult, GivenTokens, Hosted
from practicum.server.requests import NOT_STABLE, STABLE
from practicum.server.wire import TrainDatum, TrainRequest
from practicum.types import Metrics

MASK = "mask"
"""An input that every loss takes: a number for each target that multiplies its loss."""

ALPHA = 32.0
"""The scale of the adapters is ALPHA / rank, so that one learning rate serves all ranks."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Which adapters: of what base, how large, from what seed, around which halves of a layer."""

    base: str
    rank: int
    seed: int = 0
    parts: tuple[str, ...] = ("attention", "mlp")

    def build(self, base: Hosted) -> Adapters:
        """New adapters over the base model."""
        return base.adapt(Lora(rank=self.rank, alpha=ALPHA), self.seed, self.parts)

    def data(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            "base_model": self.base,
            "rank": self.rank,
            "seed": self.seed,
            "parts": list(self.parts),
        }

    @classmethod
    def of_data(cls, data: Mapping[str, Any]) -> "AdapterSpec":
        """From what `data` gave."""
        return cls(data["base_model"], data["rank"], data["seed"], tuple(data["parts"]))


@dataclass(slots=True)
class TrainingModel:
    """One client's model. While its base is out of memory its state waits in memory of its own."""

    id: str
    spec: AdapterSpec
    metadata: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    saved_steps: int = 0
    trainer: Adapters | None = None
    _state: Mapping[str, Mapping[str, Tensor]] | None = None
    _gradients: Mapping[str, Tensor] = field(default_factory=dict)

    def over(self, base: Hosted) -> Adapters:
        """Its trainer, built anew where its base model was let go in the meantime."""
        if self.trainer is None:
            self.trainer = self.spec.build(base)
            if self._state is not None:
                self.trainer.load_state(self._state)
                self.trainer.set_gradients(self._gradients)
                self._state, self._gradients = None, {}
        return self.trainer

    def suspend(self) -> None:
        """Let go of the base model and keep what is its own."""
        if self.trainer is None:
            return
        self._state = {
            stem: {name: tensor.clone() for name, tensor in named.items()}
            for stem, named in self.trainer.save_state().items()
        }
        self._gradients = self.trainer.gradients
        self.trainer = None

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Weights and moments as they are, whether or not the base model is in memory."""
        return self.trainer.save_state() if self.trainer is not None else self._state or {}

    def load(self, base: Hosted, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over saved weights and moments, and forget what was accumulated."""
        trainer = self.over(base)
        trainer.load_state(tensors)
        trainer.set_gradients({})


def forward_backward(model: TrainingModel, base: Hosted, request: TrainRequest) -> GivenResult:
    """The gradient of the request's loss added to what has been accumulated, or its numbers alone.

    Raises DataError where a datum does not fit the loss or the model.
    """
    loss = POLICY_LOSSES.get(request.loss)
    if request.loss == STABLE:
        raise DataError(NOT_STABLE)
    if loss is None:
        raise DataError(
            f"loss_fn {request.loss!r:.40} is not computed here; there are {', '.join(POLICY_LOSSES)}"
        )
    parameters = _parameters(loss, request.parameters)
    vocabulary, context = base.vocab_size, base.context_length
    data = [
        _given(loss, parameters, datum, f"datum {number}", vocabulary, context)
        for number, datum in enumerate(request.data)
    ]
    if not data:
        raise DataError("the request has no data; send at least one datum")
    trainer = model.over(base)
    if request.forward_only:
        return trainer.forward(data)
    return trainer.forward_backward(data, seed_of(model.spec.seed, "dropout", request.seq_id))


def optim_step(model: TrainingModel, base: Hosted, params: AdamParams) -> Metrics:
    """One step of AdamW on what has been accumulated."""
    metrics = model.over(base).optim_step(params)
    model.steps += 1
    return metrics


def _parameters(loss: PolicyLoss, given: Mapping[str, float | str]) -> dict[str, float]:
    found = dict(loss.defaults)
    for name, value in given.items():
        if name not in loss.defaults or isinstance(value, str):
            known = ", ".join(loss.defaults) or "none"
            raise DataError(
                f"loss_fn_config of {loss.name}: no number is named {name!r:.40}; there are: {known}"
            )
        found[name] = value
    return found


def _given(
    loss: PolicyLoss,
    parameters: Mapping[str, float],
    datum: TrainDatum,
    where: str,
    vocabulary: int,
    context: int,
) -> GivenTokens:
    """One datum with its loss, every shape and token checked."""
    count = len(datum.tokens)
    expected = {"target_tokens", *loss.inputs}
    missing, more = (
        expected - datum.inputs.keys() - loss.filled.keys(),
        datum.inputs.keys() - expected - {MASK},
    )
    if missing or more:
        raise DataError(
            f"{where}: {loss.name} is computed from {', '.join(sorted(expected))}, not from "
            f"{', '.join(sorted(datum.inputs)) or 'nothing'}"
        )
    targets = datum.inputs["target_tokens"]
    if not 1 <= count <= context:
        raise DataError(f"{where}: it has {count} tokens, and the model reads 1 to {context}")
    wide = targets.dim() == 2 and loss.name == "cross_entropy"
    if (
        targets.is_floating_point()
        or targets.shape[:1] != (count,)
        or not (targets.dim() == 1 or wide)
    ):
        also = " or [N, K]" if loss.name == "cross_entropy" else ""
        raise DataError(
            f"{where}: target_tokens has the shape {list(targets.shape)}, not that of the {count} tokens{also}"
        )
    check_token_ids(datum.tokens, vocabulary, f"{where}: model_input")
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise DataError(f"{where}: target_tokens are not all below the vocabulary of {vocabulary}")
    filled = {name: torch.full(targets.shape, value) for name, value in loss.filled.items()}
    given = {**filled, **datum.inputs}
    for name in (*loss.inputs, *datum.inputs.keys() & {MASK}):
        if given[name].shape != targets.shape:
            raise DataError(
                f"{where}: {name} has the shape {list(given[name].shape)}, target_tokens {list(targets.shape)}"
            )
    if loss.whole_text and not given["sequence_ratio_mask"].any():
        raise DataError(
            f"{where}: sequence_ratio_mask marks no token; mark those that were sampled"
        )
    columns = [given[name].float().view(count, -1) for name in loss.inputs]
    mask = given.get(MASK, torch.ones(())).float().expand(targets.shape).reshape(count, -1)

    def of(logprobs: Tensor, piece: slice) -> Tensor:
        here = [column[piece].to(logprobs.device) for column in columns]
        return loss.function(logprobs, *here, **parameters) * mask[piece].to(logprobs.device)

    return GivenTokens(datum.tokens, targets.long().view(count, -1), of, loss.whole_text)


def check_token_ids(tokens: Sequence[int], vocabulary: int, where: str) -> None:
    """DataError unless every token is one of the vocabulary."""
    strange = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if strange is not None:
        raise DataError(
            f"{where}: token {strange} is not one of the {vocabulary} of the vocabulary"
        )


def resolve_max_grad_norm(norm: float) -> float:
    """The largest norm of the gradient; the API's 0 is none at all."""
    return norm if norm > 0 else torch.inf
