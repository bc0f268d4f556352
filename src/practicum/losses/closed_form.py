"""Compute one chunk of the loss and its gradient in the hidden states, in one of two ways.

`Fused`, for the usual objectives: the gradient in the logits is known in closed form. Both heads'
products go into tiles that are allocated once, and each exponential is computed once. So a chunk
costs little more than its matrix products, and memory does not grow with the number of tokens.
`Autograd`, for objectives with any other term (candidates, drawn tokens, other targets): autograd
differentiates the values of `compute_values`. `build_chunk` chooses by `CompiledObjective.fuses`;
metrics.jsonl has the share of fused tokens as `fused`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum import functional as F
from practicum.functional.chunked import BufferPool, sum_products
from practicum.functional.distributions import SMALLEST_TAIL
from practicum.functional.divergences import DistributionPair, floored
from practicum.functional.dual_space import Projections
from practicum.functional.head import Head
from practicum.functional.precision import IMPOSSIBLE, finite
from practicum.losses.both_spaces import read_both_spaces
from practicum.losses.compile import ClosedForm, CompiledObjective
from practicum.losses.reverse_kl_kernel import KernelReverseKL, has_kernel
from practicum.losses.signal_reader import measure_level, read_tokens
from practicum.losses.support import share_pair
from practicum.losses.tokens import TermValues, TokenBatch
from practicum.losses.vocabulary_axis import (
    compute_values,
    forget_unknown,
    mark_scored,
)
from practicum.objective.distribution import TeacherDistribution
from practicum.types import HeadLike, TeacherSignal

Distributions = tuple[Float[Tensor, "t V"], Float[Tensor, "t V"]]
"""The log-probabilities of student and teacher at the same positions."""


@runtime_checkable
class LossChunk(Protocol):
    """The values and the gradient of the loss at some tokens.

    `values` go to the token side, which returns one coefficient per token for each term. `fused`
    is True if the gradient is in closed form and False if autograd computes it.
    """

    values: list[TermValues]
    fused: bool

    def backward(self, coefficients: Sequence[Float[Tensor, " T"]]) -> Float[Tensor, "T D"]:
        """Return the gradient of `sum(coefficient * value)` in the hidden states.

        The gradient of the head's weights is accumulated in them.
        """
        ...

    def get_distributions(self, positions: Int[Tensor, " t"]) -> Distributions | None:
        """Return the log-probabilities of student and teacher at some positions, or None.

        They are None if the teacher's distribution is not known. Call this before `backward`.
        """
        ...


def build_chunk(
    head: Head,
    hidden: Float[Tensor, "T D"],
    signals: tuple[TeacherSignal, TeacherSignal],
    batch: TokenBatch,
    objective: CompiledObjective,
    tiles: BufferPool,
    maps: Projections | None = None,
) -> LossChunk:
    """Return the chunk, fused if head, teacher and objective allow it.

    `signals` are the teacher's and the reference's signals about the tokens of the chunk. `maps`
    are the maps between hidden states, for an objective that reads both spaces.
    """
    teacher = signals[0]
    has_distribution = _can_read_distributions(teacher, hidden.device)
    # A teacher without hidden states gave log-probabilities of the sampled tokens, or nothing:
    # terms that only need log-probabilities have a closed form too.
    readable = has_distribution or (teacher.pool is None and teacher.hidden is None)
    if head.has_closed_form_gradient and readable and objective.fuses(has_distribution):
        if has_kernel(head, hidden, teacher, objective, tiles):
            return KernelReverseKL(head, hidden, teacher, batch, tiles)
        return Fused(head, hidden, teacher, batch, objective, tiles)
    return Autograd(head, hidden, signals, batch, objective, maps)


class Autograd:
    """A chunk with a gradient computed by autograd; see `LossChunk`."""

    fused = False

    def __init__(
        self,
        head: Head,
        hidden: Float[Tensor, "T D"],
        signals: tuple[TeacherSignal, TeacherSignal],
        batch: TokenBatch,
        objective: CompiledObjective,
        maps: Projections | None = None,
    ) -> None:
        tokens = slice(0, len(hidden))
        teacher, reference = (
            read_tokens(
                signal, tokens, with_level=objective.needs_logits, with_own=objective.needs_own
            ).to(hidden.device)
            for signal in signals
        )
        self._hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            logits = head.logits(self._hidden)
            student = torch.log_softmax(logits, dim=-1)
            if objective.needs_student_level:
                teacher = replace(teacher, student_level=torch.logsumexp(logits, dim=-1))
            if maps is not None and not signals[0].is_empty:
                spaces = read_both_spaces(head, self._hidden, signals[0], maps)
                teacher = replace(teacher, spaces=spaces)
            self._values = compute_values(objective.logits, student, teacher, batch, reference)
        self._pair = student.detach(), teacher
        self.values = [value.detach() for value in self._values]

    def backward(self, coefficients: Sequence[Float[Tensor, " T"]]) -> Float[Tensor, "T D"]:
        """Return the gradient in the hidden states; see `LossChunk.backward`."""
        with torch.enable_grad():
            losses = [
                (coefficient.to(values.loss_value) * values.loss_value).sum()
                for coefficient, values in zip(coefficients, self._values, strict=True)
            ]
            torch.stack(losses).sum().backward()
        assert self._hidden.grad is not None
        return self._hidden.grad

    def get_distributions(self, positions: Int[Tensor, " t"]) -> Distributions | None:
        """Return both distributions at the positions; see `LossChunk.get_distributions`."""
        student, teacher = self._pair
        if teacher.full is None:
            return None
        return share_pair(student[positions], replace(teacher, full=teacher.full[positions]))


class Fused:
    """A chunk with a gradient computed in closed form; see `LossChunk`."""

    fused = True

    @torch.no_grad()
    def __init__(
        self,
        head: Head,
        hidden: Float[Tensor, "T D"],
        teacher: TeacherSignal,
        batch: TokenBatch,
        objective: CompiledObjective,
        tiles: BufferPool,
    ) -> None:
        self._head = head
        self._hidden = hidden.detach()
        self._batch = batch
        self._objective = objective
        self._tiles = tiles
        self._shape = (len(hidden), head.vocab_size)
        self._pair: DistributionPair | None = None
        self._outside: Tensor | None = None
        self._level: Tensor | None = None
        self._unknown = None if teacher.unknown is None else teacher.unknown.to(hidden.device)
        logits = self._compute_logits(head, self._hidden)
        self._probs = torch.softmax(logits, dim=-1, out=self._take("student_probs"))
        # The tile of the logits is free after these two lines: it is reused for the teacher and the
        # gradient. A prepacked head allocates a new matrix, which must be freed before the
        # teacher's is allocated.
        student = torch.log_softmax(logits, dim=-1, out=self._take("student"))
        del logits
        if teacher.hidden is not None or teacher.pool is not None:
            self._pair = self._read_pair(student, teacher)
        assert objective.closed is not None, "only objectives with a closed form come here"
        divergences, self._slopes = zip(
            *(self._differentiate(number, form) for number, form in enumerate(objective.closed)),
            strict=True,
        )
        # Computed separately: a pair's slopes may be over a different set of tokens than the
        # student's.
        self._entropy_slope = self._compute_entropy_slope(student)
        self.values = self._collect_values(student, teacher, divergences)

    @torch.no_grad()
    def backward(self, coefficients: Sequence[Float[Tensor, " T"]]) -> Float[Tensor, "T D"]:
        """Return the gradient in the hidden states; see `LossChunk.backward`.

        It overwrites the tiles, so a chunk can be differentiated once.
        """
        on_device = [coefficient.to(self._probs) for coefficient in coefficients]
        return self._head.backward(self._hidden, self._compute_logit_gradient(on_device))

    def get_distributions(self, positions: Int[Tensor, " t"]) -> Distributions | None:
        """Return both distributions at the positions; see `LossChunk.get_distributions`."""
        pair = self._pair
        return None if pair is None else (pair.student[positions], pair.teacher[positions])

    def _take(self, name: str) -> Tensor:
        return self._tiles.take(name, self._shape, self._hidden)

    def _take_for_pair(self, name: str) -> Tensor:
        """Return a tile as wide as the pair, which has one more column if vocabularies differ."""
        assert self._pair is not None, "the pair is read before its tiles are taken"
        rows, columns = self._pair.student.shape
        return self._tiles.take(name, (rows, columns), self._hidden)

    def _read_folded_pair(self, student: Tensor, teacher: TeacherSignal) -> DistributionPair:
        """Return the pair on the common support of two vocabularies, in fresh matrices."""
        tokens, with_level = slice(0, self._shape[0]), self._objective.needs_logits
        distribution = read_tokens(teacher, tokens, with_level=with_level).to(student.device)
        self._level = distribution.level
        self._outside, self._unknown = distribution.outside, distribution.unknown
        folded = [finite(part) for part in share_pair(student, distribution)]
        return DistributionPair(folded[0], folded[0].exp(), folded[1], folded[1].exp())

    def _read_pair(self, student: Tensor, teacher: TeacherSignal) -> DistributionPair:
        members = (teacher,) if teacher.pool is None else teacher.pool.members
        if any(member.outside is not None for member in members):
            return self._read_folded_pair(student, teacher)
        logprobs = self._take("teacher")
        if teacher.pool is None:
            states = teacher.states
            assert teacher.head is not None and states is not None
            logits = self._compute_logits(teacher.head, states)
            torch.log_softmax(logits, dim=-1, out=logprobs)
            # Compute this now: the tile of the logits is reused for the probabilities next.
            self._level = measure_level(logits, logprobs) if self._objective.needs_logits else None
        else:
            pooled = read_tokens(teacher, slice(0, self._shape[0])).full
            assert pooled is not None, "the members give whole distributions"
            logits = self._take("logits")
            logprobs.copy_(pooled)
        # Do not check whether any token is impossible: the program would wait for the device.
        logprobs.clamp_(min=IMPOSSIBLE)
        return DistributionPair(student, self._probs, logprobs, torch.exp(logprobs, out=logits))

    def _compute_logits(self, head: HeadLike, hidden: Tensor) -> Tensor:
        return head.logits(hidden, lambda: self._take("logits"))

    def _differentiate(self, number: int, form: ClosedForm) -> tuple[Tensor | None, Tensor | None]:
        """Return the divergence of a term and its slope in log S, or None twice."""
        if self._pair is None or form.slope is None:
            return None, None
        slope = self._take_for_pair(f"slope {number}")
        value = form.slope(self._pair, slope, lambda: self._take_for_pair("scratch"))
        return value, slope

    def _collect_values(
        self, student: Tensor, teacher: TeacherSignal, divergences: Sequence[Tensor | None]
    ) -> list[TermValues]:
        tokens, pair = self._batch.tokens, self._pair
        logprobs = F.gather_logprobs(student, tokens)
        student_entropy = -sum_products(self._probs, student)
        teacher_logprobs = teacher_entropy = reverse_kl = None
        if pair is not None:
            teacher_logprobs = F.gather_logprobs(pair.teacher, tokens)
            teacher_entropy = -sum_products(pair.teacher_probs, pair.teacher)
            reverse_kl = self._compute_reverse_kl(pair, divergences)
        elif teacher.logprobs is not None:
            teacher_logprobs = teacher.logprobs.to(logprobs)
            reverse_kl = forget_unknown(F.k1(logprobs, teacher_logprobs), self._unknown)
        values = []
        assert self._objective.closed is not None, "only objectives with a closed form come here"
        for side, form, divergence in zip(
            self._objective.logits, self._objective.closed, divergences, strict=True
        ):
            is_scored = not side.needs_signal or teacher_logprobs is not None
            unknown = self._unknown if side.needs_signal else None
            loss_value = side.compute_token_value(logprobs) if divergence is None else divergence
            if side.is_alone:
                loss_value = -student_entropy
            distribution = TeacherDistribution(
                None if pair is None else pair.teacher, outside=self._outside, level=self._level
            )
            logits, state_values = side.compute_state_values(distribution, teacher_logprobs)
            term_values = TermValues(
                loss_value=loss_value,
                is_scored=mark_scored(logprobs, unknown, is_scored=is_scored),
                logprobs=logprobs,
                teacher_logprobs=forget_unknown(teacher_logprobs, unknown)
                if side.needs_signal
                else None,
                divergence=reverse_kl if form.reads_kl else divergence,
                student_entropy=student_entropy,
                teacher_entropy=teacher_entropy,
                reverse_kl=reverse_kl,
                **side.rank(student, pair and pair.teacher, self._batch),
                teacher_logits=logits,
                teacher_values=state_values,
            )
            values.append(term_values.detach())
        return values

    def _compute_entropy_slope(self, student: Tensor) -> Tensor | None:
        """Return the slope of sum S log S in log S, or None if no term is about entropy."""
        if not any(side.is_alone for side in self._objective.logits):
            return None
        return torch.mul(self._probs, student, out=self._take("entropy slope"))

    def _compute_reverse_kl(
        self, pair: DistributionPair, divergences: Sequence[Tensor | None]
    ) -> Tensor:
        """Return reverse KL to the teacher, from a term that has it; otherwise compute it."""
        for side, divergence in zip(self._objective.logits, divergences, strict=True):
            if side.measures_teacher and divergence is not None:
                return divergence
        scratch = floored(pair.student, pair.teacher, out=self._take_for_pair("scratch"))
        return torch.sub(pair.student, scratch, out=scratch).mul_(pair.student_probs).sum(dim=-1)

    def _compute_logit_gradient(self, coefficients: Sequence[Tensor]) -> Tensor:
        """Compute the gradient in the logits; it overwrites the first slope."""
        # If g is the gradient in the log-probabilities, the gradient in the logits is g - softmax *
        # sum(g). Every term adds to the same g: its coefficient times its slope, or its coefficient
        # at the sampled token. So all terms share one [T, V] buffer and one correction. A slope may
        # be off by a multiple of the softmax: the correction removes it.
        total: Tensor | None = None
        sampled, alone = torch.zeros_like(coefficients[0]), torch.zeros_like(coefficients[0])
        for side, coefficient, slope in zip(
            self._objective.logits, coefficients, self._slopes, strict=True
        ):
            if side.is_alone:
                alone += coefficient
            elif slope is None:
                sampled += side.compute_token_value(coefficient)
            elif total is None:
                total = slope.mul_(coefficient[:, None])
            else:
                total.addcmul_(slope, coefficient[:, None])
        # Without a slope there is no tile to overwrite, so the free tile of the logits is used.
        total = self._take("logits").zero_() if total is None else self._unfold(total)
        if self._entropy_slope is not None:
            total.addcmul_(self._entropy_slope, alone[:, None])
        gradient_sum = total.sum(dim=-1).add_(sampled)
        total.scatter_add_(-1, self._batch.tokens[:, None], sampled[:, None])
        return total.sub_(self._probs.mul_(gradient_sum[:, None]))

    def _unfold(self, slope: Tensor) -> Tensor:
        """Return a slope in the folded log-probabilities as one in the student's own.

        The bucket's slope goes to the tokens in it by their shares, since d log(sum S) = sum S_i /
        (sum S) d log S_i; a bucket at its floor is constant.
        """
        if self._outside is None:
            return slope
        probs = self._probs[:, self._outside]
        mass = probs.sum(dim=-1, keepdim=True)
        shares = torch.where(mass > SMALLEST_TAIL, probs / mass.clamp(min=SMALLEST_TAIL), 0.0)
        return slope[:, :-1].index_copy(1, self._outside, slope[:, -1:] * shares)


def _can_read_distributions(teacher: TeacherSignal, device: torch.device) -> bool:
    """Return True if the device can compute the teacher's full distribution.

    Of a pool, every member must have one.
    """
    members = (teacher,) if teacher.pool is None else teacher.pool.members
    return all(
        member.head is not None
        and isinstance(member.hidden, Tensor)
        and member.hidden.device == device
        for member in members
    )
