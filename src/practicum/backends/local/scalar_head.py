"""Train a model with one output per token: a body with a linear output of width one, and AdamW.

The caller of `fit` computes the loss and passes its derivative with respect to each output. For any
loss, a step therefore uses the sum of slope times output, and is split into micro-batches like the
student's step.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.adamw import take_step
from practicum.backends.local.device_limits import TrainerLimits, find_limits
from practicum.backends.local.graph import (
    activation_checkpointing,
    measure_activation_bytes,
    plan_micro_batch,
)
from practicum.backends.local.language_model import LanguageModel
from practicum.backends.local.packing import compute_hidden_states, iterate_hidden_states
from practicum.backends.local.ranks import is_out_of_memory
from practicum.costs import GraphPlan
from practicum.costs.segments import split_by_tokens
from practicum.errors import CheckpointError, ResourceError
from practicum.ports import AdamParams, ScalarModel
from practicum.text.tokenizers import shorten_error
from practicum.types import Metrics, ScoreRequest

HEAD = "scalar_head"
"""The name of the output's weights; its bias is the last entry."""


class LocalScalarModel(ScalarModel):
    """See `practicum.ports.ScalarModel`; with `is_shared`, only the output is trained here.

    The gradients of a shared body stay in its weights for the optimizer of its owner.
    """

    def __init__(
        self, language_model: LanguageModel, limits: TrainerLimits, *, is_shared: bool = False
    ) -> None:
        self._language_model = language_model
        self._limits = limits
        width = language_model.model.config.get_text_config().hidden_size
        # Start from 0: a new scorer predicts 0 for every token, and draws no random numbers.
        head = torch.nn.Parameter(torch.zeros(width + 1, device=language_model.device))
        body = {} if is_shared else language_model.trainable_parameters()
        self._parameters = {**body, HEAD: head}
        self._head = head
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=0.0)
        self._bytes_a_token: int | None = None

    @torch.no_grad()
    def predict(self, texts: Sequence[ScoreRequest]) -> list[Float[Tensor, " _"]]:
        """Return the output at the state before each of a text's tokens."""
        model = self._language_model
        model.model.eval()
        limit = find_limits(model.device).scored_tokens
        states = iterate_hidden_states(model, texts, limit)
        return [self._read(hidden).cpu() for hidden in states] if texts else []

    def fit(
        self,
        texts: Sequence[ScoreRequest],
        slopes: Sequence[Float[Tensor, " _"]],
        params: AdamParams,
    ) -> Metrics:
        """Take one AdamW step along the negative slopes; see `practicum.ports.ScalarModel`."""
        self._language_model.model.eval()
        plan = self._plan(texts)
        try:
            with activation_checkpointing(self._language_model, plan.recompute):
                self._add_gradients(texts, slopes, plan.tokens)
        except RuntimeError as error:
            self._optimizer.zero_grad(set_to_none=True)
            if not is_out_of_memory(error):
                raise
            raise ResourceError(
                f"a scorer's update of {plan.tokens} tokens at once does not fit in memory "
                f"({shorten_error(error)}); lower backend.micro_batch_tokens, or give the scorer a "
                "model with lora or fewer trainable_layers"
            ) from error
        return self._step(params)

    def save_state(self) -> dict[str, Tensor]:
        """Return the trained weights and AdamW's moments."""
        moments = {
            f"{name}/{moment}": tensor.detach()
            for name, parameter in self._parameters.items()
            for moment, tensor in self._optimizer.state.get(parameter, {}).items()
        }
        return {name: weight.detach() for name, weight in self._parameters.items()} | moments

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore weights and moments; raise CheckpointError if they belong to another model."""
        if not tensors:
            return
        # Moments are named after their weight, and no parameter of torch has a slash in its name.
        weights = {name: tensor for name, tensor in tensors.items() if "/" not in name}
        shapes = {name: weight.shape for name, weight in self._parameters.items()}
        if shapes != {name: tensor.shape for name, tensor in weights.items()}:
            raise CheckpointError(
                "the saved weights of a scorer do not fit its model; resume with the model, lora "
                "and trainable_layers that they were saved with"
            )
        for name, weight in self._parameters.items():
            weight.copy_(weights[name])
        self._optimizer.state.clear()
        for key in tensors.keys() - weights.keys():
            name, moment = key.rsplit("/", 1)
            # AdamW counts its steps on the CPU.
            device = "cpu" if moment == "step" else self._parameters[name].device
            state = self._optimizer.state[self._parameters[name]]
            state[moment] = tensors[key].detach().clone().to(device)

    def _read(self, hidden: Float[Tensor, "T D"]) -> Float[Tensor, " T"]:
        """Return the outputs of hidden states."""
        return hidden.float() @ self._head[:-1] + self._head[-1]

    def _plan(self, texts: Sequence[ScoreRequest]) -> GraphPlan:
        """Plan the micro-batches of an update like the student's."""
        if self._limits.micro_batch_tokens is not None:
            return GraphPlan(self._limits.micro_batch_tokens, recompute=False)
        if self._bytes_a_token is None:
            self._bytes_a_token = measure_activation_bytes(self._language_model)
        longest = max(len(text.prompt_tokens) + len(text.tokens) for text in texts)
        budget = self._limits.graph_mib * 2**20
        return plan_micro_batch(self._language_model, self._bytes_a_token, longest, budget)

    def _add_gradients(
        self, texts: Sequence[ScoreRequest], slopes: Sequence[Tensor], limit: int
    ) -> None:
        """Add the gradient of the sum of slope times output, one micro-batch at a time."""
        model = self._language_model
        for part in split_by_tokens(texts, limit, model.max_packed_tokens):
            numbers = self._read(compute_hidden_states(model, texts[part]))
            (torch.cat(list(slopes[part])).to(numbers) * numbers).sum().backward()

    def _step(self, params: AdamParams) -> Metrics:
        """Clip, apply and clear the gradient; skip and report the step if it is not finite."""
        norm = torch.nn.utils.clip_grad_norm_(
            list(self._parameters.values()), params.max_grad_norm
        ).item()
        finite = norm < float("inf")
        if finite:
            take_step(self._optimizer, params)
        self._optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "skipped": float(not finite)}
