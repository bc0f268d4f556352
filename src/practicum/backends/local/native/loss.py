"""Compute reverse KL and its gradient in compiled code; see `practicum.objective.compiled`."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.backends.local.native.library import NativeLibrary


@dataclass(frozen=True, slots=True)
class NativeReverseKL:
    """The kernel of `practicum.functional.chunked.ReverseKLKernel`, for float32 on x86 processors.

    The bits of a row do not depend on the rest of the batch or on the number of threads.
    """

    library: NativeLibrary

    def measure(
        self, student: Float[Tensor, "T V"], teacher: Float[Tensor, "T V"]
    ) -> Float[Tensor, "7 T"]:
        """Return the numbers of each row; see `ReverseKLKernel.measure`."""
        numbers = torch.empty(7, len(student))
        self.library.call("measure_loss", student, teacher, *student.shape, numbers)
        return numbers

    def differentiate(
        self,
        student: Float[Tensor, "T V"],
        teacher: Float[Tensor, "T V"],
        numbers: Float[Tensor, "7 T"],
        coefficients: Float[Tensor, " T"],
    ) -> None:
        """Write the gradient over the student's logits; see `ReverseKLKernel.differentiate`."""
        weights = coefficients.contiguous()
        self.library.call("differentiate_loss", student, teacher, *student.shape, numbers, weights)
