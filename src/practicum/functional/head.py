"""The head of a language model: hidden states in, logits out."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.products import Projection, add_outer, project, project_back


@dataclass(frozen=True, slots=True)
class Head:
    """The last linear map of a language model, cut to the `vocab_size` real tokens.

    Rows of `weight` past `vocab_size` are padding of the embedding matrix and never get
    probability. `operand` is a copy of the real rows in the dtype of the products, or None if this
    is the dtype of `weight`; gradients reach `weight`. Logits are always in float32, for every
    dtype of the products.
    """

    weight: Float[Tensor, "V D"]
    vocab_size: int
    bias: Float[Tensor, " V"] | None = None
    scale: float = 1.0
    softcap: float | None = None
    operand: Float[Tensor, "v D"] | None = None

    @property
    def rows(self) -> Float[Tensor, "v D"]:
        """The rows of the real tokens in the dtype of the products, without a gradient."""
        return self.weight.detach()[: self.vocab_size] if self.operand is None else self.operand

    @property
    def key(self) -> tuple[int, ...]:
        """The address of the weights and the number of real rows, which identify the head."""
        return self.weight.data_ptr(), self.vocab_size

    def release(self) -> None:
        """Do nothing: a model holds these weights."""

    def logprobs(self, hidden: Float[Tensor, "*s D"]) -> Float[Tensor, "*s v"]:
        """Return the log-probabilities of the real tokens, in float32 for any dtype of weights."""
        return torch.log_softmax(self.logits(hidden), dim=-1)

    def detached(self) -> "Head":
        """Return the same head over the current storage of the weights, without a gradient."""
        return replace(
            self, weight=self.weight.data, bias=None if self.bias is None else self.bias.data
        )

    @property
    def has_closed_form_gradient(self) -> bool:
        """True if the head is a bare matrix, so that its gradient has a closed form.

        A matrix below float32 must be frozen: its own gradient would be accumulated with too few
        digits.
        """
        bare = self.bias is None and self.softcap is None and self.weight.is_leaf
        return bare and (
            self.weight.dtype in (torch.float32, torch.float64) or not self.weight.requires_grad
        )

    def backward(
        self, hidden: Float[Tensor, "T D"], gradient: Float[Tensor, "T v"]
    ) -> Float[Tensor, "T D"]:
        """Backpropagate through a plain head: return the gradient of its hidden states, and add the
        weights' gradient to `weight.grad`.
        """
        # In place: the logit gradient is the largest tensor of an update, and the caller no longer
        # needs it. Only the real rows of the weight get a gradient, so padding never changes.
        gradient = gradient if self.scale == 1.0 else gradient.mul_(self.scale)
        if self.weight.requires_grad:
            if self.weight.grad is None:
                self.weight.grad = torch.zeros_like(self.weight)
            total = self.weight.grad[: self.vocab_size]
            add_outer(total, gradient, hidden, self.rows.dtype)
        return project_back(gradient, self.rows).to(hidden.dtype)

    def logits(
        self, hidden: Float[Tensor, "*s D"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """Return float32 logits; with `room`, which gives the output buffer, without a graph."""
        if room is not None:
            out = room()
            precise = torch.promote_types(self.weight.dtype, torch.float32)
            if not self.has_closed_form_gradient or out.dtype != precise:
                return out.copy_(self.logits(hidden))
            product = project(hidden, self.rows, out)
            return product if self.scale == 1.0 else product.mul_(self.scale)
        bias = None if self.bias is None else self.bias[: self.vocab_size]
        weight, dtype = self.weight[: self.vocab_size], self.rows.dtype
        if dtype in (torch.float32, torch.float64):
            linear = torch.nn.functional.linear(hidden.to(dtype), weight, bias)
            return self.scaled_and_capped(linear)
        product = Projection.apply(hidden.flatten(0, -2), weight, self.rows)
        product = product.unflatten(0, hidden.shape[:-1])
        return self.scaled_and_capped(product if bias is None else product + bias)

    def scaled_and_capped(self, product: Float[Tensor, "*s v"]) -> Float[Tensor, "*s v"]:
        """Scale and softly cap a product of hidden states and weights; return float32 logits."""
        logits = product.to(torch.promote_types(product.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


@dataclass(frozen=True, slots=True)
class TableHead:
    """A head for log-probabilities in a table; see `practicum.types.HeadLike`.

    A hidden state is the index of its row in the table.
    """

    table: Float[Tensor, "R V"]

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        return self.table.shape[-1]

    @property
    def key(self) -> tuple[int, ...]:
        """The table's address and its number of rows."""
        return self.table.data_ptr(), len(self.table)

    def logprobs(self, hidden: Float[Tensor, "*s 1"]) -> Float[Tensor, "*s v"]:
        """Return the exact rows of these hidden states."""
        return self.table[hidden[..., 0].long().to(self.table.device)]

    def logits(
        self, hidden: Float[Tensor, "*s 1"], room: Callable[[], Tensor] | None = None
    ) -> Float[Tensor, "*s v"]:
        """Return the same rows: log-probabilities are logits."""
        rows = self.logprobs(hidden)
        return rows if room is None else room().copy_(rows)

    def release(self) -> None:
        """Do nothing: the rows are few."""
