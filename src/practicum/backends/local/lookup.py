"""Add the gradient of looked-up embedding rows only to these rows.

In every backward pass, torch allocates a matrix of zeros as large as the embedding, adds a few
hundred rows to it, and adds the full matrix to the gradient. The first access to such a matrix
costs more than the rows.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.backends.local.language_model import LanguageModel, patch_forwards


def add_rows_in_place(language_model: LanguageModel) -> AbstractContextManager[None]:
    """Limit the embedding's gradient to the rows that a pass reads, with the same bits as torch.

    This only applies on a CPU, where rows are added in a fixed order, and to a plain embedding.
    """
    embedding = language_model.model.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding) or not _is_plain(embedding):
        return patch_forwards({})
    return patch_forwards({embedding: _build_lookup(embedding)})


def _is_plain(embedding: torch.nn.Embedding) -> bool:
    weight = embedding.weight
    return (
        type(embedding) is torch.nn.Embedding
        and weight.device.type == "cpu"
        and weight.requires_grad
        and weight.is_leaf
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
        and not embedding.sparse
    )


def _build_lookup(embedding: torch.nn.Embedding) -> Callable[[Tensor], Tensor]:
    return lambda ids: _Lookup.apply(embedding.weight, ids, embedding.padding_idx)


class _Lookup(torch.autograd.Function):
    """Look up rows of a weight, and add their gradient to the weight's gradient in place."""

    @staticmethod
    # torch names these parameters, and passes the arguments of `apply` to the forward pass.
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        weight: Float[Tensor, "V D"],
        ids: Int[Tensor, "*s"],
        padding: int | None,
    ) -> Float[Tensor, "*s D"]:
        """Return the rows, and store their indices."""
        ctx.lookup = weight, ids, padding  # type: ignore[attr-defined]
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, gradient: Float[Tensor, "*s D"]
    ) -> tuple[None, None, None]:
        """Add the sum of each row's gradients; a padding row never changes."""
        weight, ids, padding = ctx.lookup  # type: ignore[attr-defined]
        # A row that is read several times is summed before it is added, as torch does.
        rows, places = ids.flatten().unique(return_inverse=True)
        sums = gradient.new_zeros(len(rows), weight.shape[1])
        sums.index_add_(0, places, gradient.flatten(0, -2))
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        learns = torch.ones_like(rows, dtype=torch.bool) if padding is None else rows != padding
        weight.grad.index_add_(0, rows[learns], sums[learns])
        return None, None, None
