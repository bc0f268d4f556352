"""Matrix products of a language model's head, accumulated in float32 for operands of any dtype.

A product of bfloat16 matrices that is also returned in bfloat16 has 8 bits: logits of 20 are off by
0.06. The products of two bfloat16 numbers are exact in float32, so only their sum is rounded here.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.functional.chunked import chunks

RETURNS_FLOAT32 = torch.__version__ >= "2.8"
"""True if this torch returns products of bfloat16 in float32 on a CUDA device."""

ADDS_FLOAT32 = torch.__version__ >= "2.10"
"""True if this torch adds products of bfloat16 to a float32 matrix on a CUDA device.

Older versions of `addmm` want the matrix in the dtype of the operands.
"""

BLOCK_ROWS = 4096
"""The rows of a bfloat16 matrix converted to float32 at once where no kernel returns float32."""


def project(
    hidden: Float[Tensor, "T D"],
    rows: Float[Tensor, "V D"],
    out: Float[Tensor, "T V"] | None = None,
) -> Float[Tensor, "T V"]:
    """Return `hidden @ rows.T`, in float32 or better; `out` is the buffer to write it into.

    Hidden states are rounded to the dtype of the rows.
    """
    hidden = hidden.to(rows.dtype)
    if _is_precise(rows):
        return torch.mm(hidden, rows.T, out=out)
    if rows.is_cuda and RETURNS_FLOAT32:
        return torch.mm(hidden, rows.T, out_dtype=torch.float32, out=out)
    product = hidden.new_empty(len(hidden), len(rows), dtype=torch.float32) if out is None else out
    wide = hidden.float()
    for part in chunks(len(rows), BLOCK_ROWS):
        product[:, part] = wide @ rows[part].float().T
    return product


def project_back(
    gradient: Float[Tensor, "T V"], rows: Float[Tensor, "V D"]
) -> Float[Tensor, "T D"]:
    """Return `gradient @ rows`, in float32 or better; the gradient is rounded to the rows' dtype."""
    gradient = gradient.to(rows.dtype)
    if _is_precise(rows):
        return gradient @ rows
    if rows.is_cuda and RETURNS_FLOAT32:
        return torch.mm(gradient, rows, out_dtype=torch.float32)
    product = gradient.new_zeros(len(gradient), rows.shape[1], dtype=torch.float32)
    for part in chunks(len(rows), BLOCK_ROWS):
        product.addmm_(gradient[:, part].float(), rows[part].float())
    return product


def add_outer(
    total: Float[Tensor, "V D"],
    gradient: Float[Tensor, "T V"],
    hidden: Float[Tensor, "T D"],
    dtype: torch.dtype,
) -> None:
    """Add `gradient.T @ hidden` to the total in place; both are rounded to `dtype` before."""
    gradient, hidden = gradient.to(dtype), hidden.to(dtype)
    if _is_precise(gradient):
        total.addmm_(gradient.T, hidden)
    elif gradient.is_cuda and ADDS_FLOAT32:
        torch.addmm(total, gradient.T, hidden, out_dtype=torch.float32, out=total)
    elif gradient.is_cuda and RETURNS_FLOAT32:
        for part in chunks(gradient.shape[1], BLOCK_ROWS):
            total[part] += torch.mm(gradient[:, part].T, hidden, out_dtype=torch.float32)
    else:
        for part in chunks(gradient.shape[1], BLOCK_ROWS):
            total[part].addmm_(gradient[:, part].T.float(), hidden.float())


class Projection(torch.autograd.Function):
    """`project` with gradients in the hidden states and in `weight`; `rows` is a copy of `weight`."""

    @staticmethod
    # torch names these parameters, and passes the arguments of `apply` to the forward pass.
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, hidden: Tensor, weight: Tensor, rows: Tensor
    ) -> Tensor:
        """Return the product, and save the tensors for its gradient."""
        ctx.save_for_backward(hidden, rows)
        return project(hidden, rows)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Return the gradients in the hidden states and in the weight."""
        hidden, rows = ctx.saved_tensors  # type: ignore[attr-defined]
        wants_hidden, wants_weight, _ = ctx.needs_input_grad  # type: ignore[attr-defined]
        weight_gradient = None
        if wants_weight:
            weight_gradient = torch.zeros(rows.shape, device=rows.device)
            add_outer(weight_gradient, gradient, hidden, rows.dtype)
        hidden_gradient = project_back(gradient, rows).to(hidden.dtype) if wants_hidden else None
        return hidden_gradient, weight_gradient, None


def _is_precise(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.float64)
