"""Multiply rows by a weight that is packed in panels of columns, in compiled code."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.native.library import NativeLibrary


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """The product `rows @ weight.T + bias`, without a gradient.

    The bits of a row do not depend on the other rows or on the number of threads.
    """

    library: NativeLibrary
    panels: Float[Tensor, "P K C"]
    columns: int
    bias: Float[Tensor, " N"] | None = None

    def __call__(self, rows: Float[Tensor, "*s K"]) -> Float[Tensor, "*s N"]:
        rows, depth = rows.contiguous(), rows.shape[-1]
        product = rows.new_empty(*rows.shape[:-1], self.columns)
        count = product.numel() // self.columns
        self.library.call("project", rows, count, self.panels, self.columns, depth, product)
        return product if self.bias is None else product.add_(self.bias)


def pack_product(
    library: NativeLibrary, weight: Float[Tensor, "N K"], bias: Float[Tensor, " N"] | None
) -> PackedProduct:
    """Return the product with a packed copy of the weight."""
    return PackedProduct(library, pack_columns(weight, library.panel), len(weight), bias)


def pack_columns(weight: Float[Tensor, "N K"], panel: int) -> Float[Tensor, "P K C"]:
    """Return the weight in panels of columns, padded with zeros."""
    panels, remainder = divmod(len(weight), panel)
    packed = weight.new_empty(panels + bool(remainder), weight.shape[1], panel)
    # One pass over the weight: padding it first would write it twice.
    rows = weight[: panels * panel].view(panels, panel, weight.shape[1])
    packed[:panels] = rows.transpose(1, 2)
    if remainder:
        packed[panels] = torch.nn.functional.pad(weight[-remainder:].T, (0, panel - remainder))
    return packed
