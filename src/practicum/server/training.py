"""Train adapters over a served base model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.errors import DataError
from practicum.functional import POLICY_LOSSES, PolicyLoss
from practicum.models.config import Lora
from practicum.ports.hosting import Adapters, GivenResult, GivenTokens, Hosted
from practicum.server.requests import NOT_STABLE, STABLE
from practicum.server.wire import TrainDatum, TrainRequest

MASK = "mask"
"""An input of every loss: a factor for the loss of each target."""

ALPHA = 32.0
"""The scale of the adapters is ALPHA / rank, so that one learning rate serves all ranks."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The adapters of a model: base, rank, seed, and the halves of a layer that have adapters."""

    base: str
    rank: int
    seed: int = 0
    parts: tuple[str, ...] = ("attention", "mlp")

    def build(self, base: Hosted) -> Adapters:
        """Return new adapters over the base model."""
        return base.adapt(Lora(rank=self.rank, alpha=ALPHA), self.seed, self.parts)

    def to_json(self) -> dict[str, Any]:
        """Return the spec as JSON."""
        return {
            "base_model": self.base,
            "rank": self.rank,
            "seed": self.seed,
            "parts": list(self.parts),
        }

    @classmethod
    def from_json(cls, spec: Mapping[str, Any]) -> "AdapterSpec":
        """Return the spec that `to_json` wrote."""
        return cls(spec["base_model"], spec["rank"], spec["seed"], tuple(spec["parts"]))


@dataclass(slots=True)
class TrainingModel:
    """One client's model; while its base is evicted, its state is kept separately in memory."""

    id: str
    spec: AdapterSpec
    metadata: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    saved_steps: int = 0
    trainer: Adapters | None = None
    _state: Mapping[str, Mapping[str, Tensor]] | None = None
    _gradients: Mapping[str, Tensor] = field(default_factory=dict)

    def attach(self, base: Hosted) -> Adapters:
        """Return the trainer, rebuilt if the base model was evicted in the meantime."""
        if self.trainer is None:
            self.trainer = self.spec.build(base)
            if self._state is not None:
                self.trainer.load_state(self._state)
                self.trainer.set_gradients(self._gradients)
                self._state, self._gradients = None, {}
        return self.trainer

    def describe(self) -> dict[str, Any]:
        """Return what the store records about the run of this model."""
        return {**self.spec.to_json(), "user_metadata": self.metadata}

    def suspend(self) -> None:
        """Release the base model and keep a copy of the adapters' state and gradients."""
        if self.trainer is None:
            return
        # The trainer's tensors share memory with the base model's modules, which are dropped.
        self._state = {
            stem: {name: tensor.clone() for name, tensor in named.items()}
            for stem, named in self.trainer.save_state().items()
        }
        self._gradients = self.trainer.gradients
        self.trainer = None

    def get_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return weights and moments, whether or not the base model is in memory."""
        return self.trainer.save_state() if self.trainer is not None else self._state or {}

    def load(self, base: Hosted, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load saved weights and moments, and drop the accumulated gradients."""
        trainer = self.attach(base)
        trainer.load_state(tensors)
        trainer.set_gradients({})


def forward_backward(model: TrainingModel, base: Hosted, request: TrainRequest) -> GivenResult:
    """Add the gradient of the request's loss to the accumulated one, or only compute the loss.

    Raise DataError if a datum does not fit the loss or the model.
    """
    loss = POLICY_LOSSES.get(request.loss)
    if request.loss == STABLE:
        raise DataError(NOT_STABLE)
    if loss is None:
        raise DataError(
            f"loss_fn {request.loss!r:.40} is not computed here; there are {', '.join(POLICY_LOSSES)}"
        )
    parameters = _read_parameters(loss, request.parameters)
    datums = [
        _check_datum(loss, parameters, datum, f"datum {number}", base)
        for number, datum in enumerate(request.data)
    ]
    if not datums:
        raise DataError("the request has no data; send at least one datum")
    trainer = model.attach(base)
    if request.forward_only:
        return trainer.forward(datums)
    # Seeded by the request's number, so that a run that is repeated drops out the same.
    return trainer.forward_backward(datums, seed_of(model.spec.seed, "dropout", request.seq_id))


def _read_parameters(loss: PolicyLoss, config: Mapping[str, float | str]) -> dict[str, float]:
    parameters = dict(loss.defaults)
    for name, number in config.items():
        if name not in loss.defaults or isinstance(number, str):
            names = ", ".join(loss.defaults) or "none"
            raise DataError(
                f"loss_fn_config of {loss.name}: no number is named {name!r:.40}; there are: {names}"
            )
        parameters[name] = number
    return parameters


def _check_datum(
    loss: PolicyLoss, parameters: Mapping[str, float], datum: TrainDatum, where: str, base: Hosted
) -> GivenTokens:
    """Return a datum with its loss; raise DataError for a wrong shape or token."""
    vocabulary, context = base.vocab_size, base.context_length
    count = len(datum.tokens)
    expected = {"target_tokens", *loss.inputs}
    missing = expected - datum.inputs.keys() - loss.filled.keys()
    if missing or datum.inputs.keys() - expected - {MASK}:
        raise DataError(
            f"{where}: {loss.name} is computed from {', '.join(sorted(expected))}, "
            f"not from {', '.join(sorted(datum.inputs)) or 'nothing'}"
        )
    targets = datum.inputs["target_tokens"]
    if not 1 <= count <= context:
        raise DataError(f"{where}: it has {count} tokens, and the model reads 1 to {context}")
    # Only cross_entropy takes several targets per token, for example for soft labels.
    wide = loss.name == "cross_entropy"
    fits = targets.shape[:1] == (count,) and (targets.dim() == 1 or (wide and targets.dim() == 2))
    if targets.is_floating_point() or not fits:
        also = " or [N, K]" if wide else ""
        raise DataError(
            f"{where}: target_tokens has the shape {list(targets.shape)}, not [{count}]{also} for {count} tokens"
        )
    check_token_ids(datum.tokens, vocabulary, f"{where}: model_input")
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < vocabulary:
        raise DataError(f"{where}: target_tokens are not all below the vocabulary of {vocabulary}")
    filled = {name: torch.full(targets.shape, value) for name, value in loss.filled.items()}
    inputs = {**filled, **datum.inputs}
    for name in (*loss.inputs, *datum.inputs.keys() & {MASK}):
        if inputs[name].shape != targets.shape:
            raise DataError(
                f"{where}: {name} has the shape {list(inputs[name].shape)}, target_tokens {list(targets.shape)}"
            )
    if loss.whole_text and not inputs["sequence_ratio_mask"].any():
        raise DataError(f"{where}: sequence_ratio_mask marks no token; mark the sampled tokens")
    columns = [inputs[name].float().view(count, -1) for name in loss.inputs]
    mask = inputs.get(MASK, torch.ones(())).float().expand(targets.shape).reshape(count, -1)

    def compute_loss(logprobs: Tensor, piece: slice) -> Tensor:
        device = logprobs.device
        pieces = [column[piece].to(device) for column in columns]
        return loss.function(logprobs, *pieces, **parameters) * mask[piece].to(device)

    targets = targets.long().view(count, -1)
    return GivenTokens(datum.tokens, targets, compute_loss, loss.whole_text)


def check_token_ids(tokens: Sequence[int], vocabulary: int, where: str) -> None:
    """Raise DataError unless every token is in the vocabulary."""
    unknown = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if unknown is not None:
        raise DataError(
            f"{where}: token {unknown} is not one of the {vocabulary} of the vocabulary"
        )
