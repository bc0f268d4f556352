"""One chunk of reverse KL to a teacher, by a kernel that reads each row of logits in a core's caches.

`closed_form.Fused` is the reference implementation and is used without a kernel. Its matrices of
log-probabilities, probabilities and slopes do not exist here: the kernel recomputes them from the
logits where it needs them, because exponentials are cheaper than memory traffic.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum.functional.chunked import BufferPool
from practicum.functional.head import Head
from practicum.functional.precision import IMPOSSIBLE
from practicum.losses.compile import CompiledObjective
from practicum.losses.tokens import TermValues, TokenBatch
from practicum.losses.vocabulary_axis import forget_unknown, mark_scored
from practicum.types import TeacherSignal

MIN_COLUMNS = 4096
"""The smallest vocabulary for the kernel: smaller rows fit in the caches anyway."""


def has_kernel(
    head: Head,
    hidden: Float[Tensor, "T D"],
    teacher: TeacherSignal,
    objective: CompiledObjective,
    tiles: BufferPool,
) -> bool:
    """Return True if a kernel computes a chunk that has a closed form."""
    return (
        tiles.kernel is not None
        and head.vocab_size >= MIN_COLUMNS
        and hidden.dtype == torch.float32
        and hidden.device.type == "cpu"
        and objective.closed is not None
        and [form.has_kernel for form in objective.closed] == [True]
        and not objective.logits[0].ranks
        and not objective.needs_logits
        and teacher.hidden is not None
        and teacher.pool is None
        and teacher.outside is None
    )


class KernelReverseKL:
    """A chunk with values and gradient computed by the kernel; see `closed_form.LossChunk`."""

    fused = True

    @torch.no_grad()
    def __init__(
        self,
        head: Head,
        hidden: Float[Tensor, "T D"],
        teacher: TeacherSignal,
        batch: TokenBatch,
        tiles: BufferPool,
    ) -> None:
        assert tiles.kernel is not None and teacher.head is not None and teacher.states is not None
        self._head, self._hidden, self._kernel = head, hidden.detach(), tiles.kernel
        shape = len(hidden), head.vocab_size
        self._student = head.logits(
            self._hidden, lambda: tiles.take("logits", shape, hidden)
        ).contiguous()
        self._teacher = teacher.head.logits(
            teacher.states, lambda: tiles.take("teacher", shape, hidden)
        ).contiguous()
        assert self._teacher.shape == shape, "the vocabularies are the same"
        self._numbers = self._kernel.measure(self._student, self._teacher)
        unknown = None if teacher.unknown is None else teacher.unknown.to(hidden.device)
        divergence, student_entropy, teacher_entropy = self._numbers[4:]
        places = torch.arange(len(hidden))
        student, of_teacher = self._read((places, batch.tokens))
        values = TermValues(
            loss_value=divergence,
            is_scored=mark_scored(student, unknown, is_scored=True),
            logprobs=student,
            teacher_logprobs=forget_unknown(of_teacher, unknown),
            divergence=divergence,
            student_entropy=student_entropy,
            teacher_entropy=teacher_entropy,
            reverse_kl=divergence,
            teacher_logits=None,
            teacher_values=None,
        )
        self.values = [values]

    @torch.no_grad()
    def backward(self, coefficients: Sequence[Float[Tensor, " T"]]) -> Float[Tensor, "T D"]:
        """Return the gradient in the hidden states; see `LossChunk.backward`.

        It overwrites the logits, so a chunk can be differentiated once.
        """
        coefficient = coefficients[0].to(self._student)
        self._kernel.differentiate(self._student, self._teacher, self._numbers, coefficient)
        return self._head.backward(self._hidden, self._student)

    def get_distributions(self, positions: Int[Tensor, " t"]) -> tuple[Tensor, Tensor]:
        """Return both distributions at the positions; see `LossChunk.get_distributions`."""
        columns = torch.arange(self._head.vocab_size)
        return self._read((positions[:, None], columns))

    def _read(self, places: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of student and teacher at some rows and columns."""
        highest, levels = self._numbers[:2, places[0]], self._numbers[2:4, places[0]]
        student = self._student[places] - highest[0] - levels[0]
        teacher = self._teacher[places] - highest[1] - levels[1]
        return student, teacher.clamp_(min=IMPOSSIBLE)
