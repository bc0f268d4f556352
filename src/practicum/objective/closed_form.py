"""One chunk of the logit side with its gradient, from hidden states to hidden states, by one of two ways with one result.

`Fused`, for the usual objectives: the gradient of the logits is written down in closed form. Both heads' products go into tiles
that are made once and each exponential is taken once, so that a chunk costs little more than its matrix products and the memory
does not grow with the tokens. `Autograd`, for objectives with another kind of term (candidates, drawn tokens, other targets): the
values of `compute_term_values` are differentiated. `build_chunk` chooses, by `can_fuse`; metrics.jsonl has the share of tokens as
`fused`.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from practicum import functional as F
from practicum.functional.chunked import BufferPool
from practicum.functional.divergences import DIVERGENCES, DistributionPair, floored
from practicum.functional.head import Head
from practicum.functional.precision import IMPOSSIBLE, finite
from practicum.objective.choices import ClipEntries, ClipLoss
from practicum.objective.estimators import Pathwise
from practicum.objective.reading import read_tokens
from practicum.objective.spec import Objective, Term
from practicum.objective.tokens import TermValues, TokenBatch
from practicum.objective.vocabulary_axis import compute_term_values, teacher_rank, value_of_token
from practicum.types import HeadLike, TeacherSignal


@runtime_checkable
class LossChunk(Protocol):
    """Some tokens between the two sides: `values` for the token side, which answers with a share for each term.

    `fused` is whether the gradient is written down and not differentiated.
    """

    values: list[TermValues]
    fused: bool

    def backward(self, shares: Sequence[Float[Tensor, " T"]]) -> Float[Tensor, "T D"]:
        """The gradient of `sum(share * value)` in the hidden states; that of the head's weights is added to theirs."""
        ...

    def distributions(
        self, some: Int[Tensor, " t"]
    ) -> tuple[Float[Tensor, "t V"], Float[Tensor, "t V"]] | None:
        """The student's and the teacher's log-probabilities at some of the tokens, before `backward`; None where not known."""
        ...


def build_chunk(
    head: Head,
    hidden: Float[Tensor, "T D"],
    said: tuple[TeacherSignal, TeacherSignal],
    batch: TokenBatch,
    objective: Objective,
    tiles: BufferPool,
) -> LossChunk:
    """Return the chunk, fused where head, teacher and objective allow it; `said` is what teacher and reference sent about it."""
    teacher = said[0]
    whole = _gives_distributions(teacher, hidden.device)
    readable = whole or (teacher.pool is None and teacher.hidden is None)
    if head.plain and readable and can_fuse(objective, whole):
        return Fused(head, hidden, teacher, batch, objective, tiles)
    return Autograd(head, hidden, said, batch, objective)


class Autograd:
    """The chunk whose gradient autograd finds; see `Chunk`."""

    fused = False

    def __init__(
        self,
        head: Head,
        hidden: Float[Tensor, "T D"],
        said: tuple[TeacherSignal, TeacherSignal],
        batch: TokenBatch,
        objective: Objective,
    ) -> None:
        whole = slice(0, len(hidden))
        teacher, reference = (read_tokens(signal, whole).to(hidden.device) for signal in said)
        self._hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            student = head.logprobs(self._hidden)
            self._values = compute_term_values(student, teacher, batch, objective, reference)
        self._pair = student.detach(), teacher.full
        self.values = [value.detached() for value in self._values]

    def backward(self, shares: Sequence[Float[Tensor, " T"]]) -> Float[Tensor, "T D"]:
        """As `Chunk` says."""
        with torch.enable_grad():
            parts = [
                (share.to(value.value) * value.value).sum()
                for share, value in zip(shares, self._values, strict=True)
            ]
            torch.stack(parts).sum().backward()
        assert self._hidden.grad is not None
        return self._hidden.grad

    def distributions(
        self, some: Int[Tensor, " t"]
    ) -> tuple[Float[Tensor, "t V"], Float[Tensor, "t V"]] | None:
        """As `Chunk` says."""
        student, teacher = self._pair
        return None if teacher is None else (student[some], teacher[some])


class Fused:
    """The chunk whose gradient is written down in closed form; see `Chunk`."""

    fused = True

    @torch.no_grad()
    def __init__(
        self,
        head: Head,
        hidden: Float[Tensor, "T D"],
        teacher: TeacherSignal,
        batch: TokenBatch,
        objective: Objective,
        tiles: BufferPool,
    ) -> None:
        self._head = head
        self._hidden = hidden.detach()
        self._batch = batch
        self._objective = objective
        self._tiles = tiles
        self._shape = (len(hidden), head.vocab_size)
        self._read: DistributionPair | None = None
        logits = self._logits(head, self._hidden)
        self._probs = torch.softmax(logits, dim=-1, out=self._tile("student_probs"))
        student = torch.log_softmax(logits, dim=-1, out=self._tile("student"))
        if teacher.hidden is not None or teacher.pool is not None:
            pair = self._read = self._pair(student, teacher)
            found = [
                self._value_and_slope(number, term, pair)
                for number, term in enumerate(objective.losses)
            ]
            self._slopes = [slope for _, slope in found]
            self.values = self._values(pair, [value for value, _ in found])
        else:
            self._slopes = [None for _ in objective.losses]
            self.values = self._values_of_tokens(student, teacher)

    @torch.no_grad()
    def backward(self, shares: Sequence[Float[Tensor, " T"]]) -> Float[Tensor, "T D"]:
        """As `Chunk` says; the tiles hold nothing of use afterwards."""
        return self._head.pull(
            self._hidden, self._gradient([share.to(self._probs) for share in shares])
        )

    def distributions(
        self, some: Int[Tensor, " t"]
    ) -> tuple[Float[Tensor, "t V"], Float[Tensor, "t V"]] | None:
        """As `Chunk` says."""
        return None if self._read is None else (self._read.student[some], self._read.teacher[some])

    def _tile(self, name: str) -> Tensor:
        return self._tiles.take(name, self._shape, self._hidden)

    def _pair(self, student: Tensor, teacher: TeacherSignal) -> DistributionPair:
        logprobs = self._tile("teacher")
        if teacher.pool is None:
            states = teacher.states
            assert teacher.head is not None and states is not None
            logits = self._logits(teacher.head, states)
            torch.log_softmax(logits, dim=-1, out=logprobs)
        else:
            pooled = read_tokens(teacher, slice(0, self._shape[0])).full
            assert pooled is not None, "the members give whole distributions"
            logits = self._tile("logits")
            logprobs.copy_(pooled)
        if logprobs.amin() < IMPOSSIBLE:
            logprobs.copy_(finite(logprobs))
        return DistributionPair(student, self._probs, logprobs, torch.exp(logprobs, out=logits))

    def _logits(self, head: HeadLike, hidden: Tensor) -> Tensor:
        return head.logits(hidden, lambda: self._tile("logits"))

    def _value_and_slope(
        self, number: int, term: Term, pair: DistributionPair
    ) -> tuple[Tensor | None, Tensor | None]:
        if not (term.asks and isinstance(term.gradient, Pathwise)):
            return None, None
        entry = DIVERGENCES[term.divergence.name]
        assert entry.slope is not None, "only terms with a closed form come here"
        slope = self._tile(f"slope {number}")
        value = entry.slope(pair, entry.resolve(term.parameter), slope, self._tile("scratch"))
        if isinstance(term.clip, ClipLoss):
            slope.mul_((value <= term.clip.maximum).to(slope)[:, None])
        return value, slope

    def _values(
        self, pair: DistributionPair, divergences: Sequence[Tensor | None]
    ) -> list[TermValues]:
        tokens = self._batch.tokens
        logprobs, teacher_logprobs = (
            F.gather_logprobs(pair.student, tokens),
            F.gather_logprobs(pair.teacher, tokens),
        )
        student_entropy = self._entropy(pair.student_probs, pair.student)
        teacher_entropy = self._entropy(pair.teacher_probs, pair.teacher)
        reverse_kl = self._compute_reverse_kl(pair, divergences)
        values = []
        for term, divergence in zip(self._objective.losses, divergences, strict=True):
            sampled = term.on_sampled_token and term.signal.whole
            term_values = TermValues(
                value=value_of_token(term, logprobs) if divergence is None else divergence,
                answered=torch.ones_like(logprobs, dtype=torch.bool),
                logprobs=logprobs,
                teacher_logprobs=teacher_logprobs if term.asks else None,
                divergence=reverse_kl if sampled else divergence,
                student_entropy=student_entropy,
                teacher_entropy=teacher_entropy,
                reverse_kl=reverse_kl,
                teacher_rank=teacher_rank(term, pair.teacher, tokens),
            )
            values.append(term_values.detached())
        return values

    def _values_of_tokens(self, student: Tensor, teacher: TeacherSignal) -> list[TermValues]:
        """The same where the teacher knows the sampled tokens alone, or nothing."""
        logprobs = F.gather_logprobs(student, self._batch.tokens)
        theirs = None if teacher.logprobs is None else teacher.logprobs.to(logprobs)
        values = []
        for term in self._objective.losses:
            term_values = TermValues(
                value=value_of_token(term, logprobs),
                answered=torch.full_like(
                    logprobs, not term.asks or theirs is not None, dtype=torch.bool
                ),
                logprobs=logprobs,
                teacher_logprobs=theirs if term.asks else None,
                divergence=None,
                student_entropy=self._entropy(self._probs, student),
                teacher_entropy=None,
                reverse_kl=None if theirs is None else F.k1(logprobs, theirs),
            )
            values.append(term_values.detached())
        return values

    def _entropy(self, probs: Tensor, logprobs: Tensor) -> Tensor:
        return -torch.mul(probs, logprobs, out=self._tile("scratch")).sum(dim=-1)

    def _compute_reverse_kl(
        self, pair: DistributionPair, divergences: Sequence[Tensor | None]
    ) -> Tensor:
        """Reverse KL to the teacher, taken from a term that has it or else measured."""
        for term, divergence in zip(self._objective.losses, divergences, strict=True):
            if term.divergence.name == "reverse_kl" and divergence is not None:
                return divergence
        scratch = floored(pair.student, pair.teacher, out=self._tile("scratch"))
        return torch.sub(pair.student, scratch, out=scratch).mul_(pair.student_probs).sum(dim=-1)

    def _gradient(self, shares: Sequence[Tensor]) -> Tensor:
        """The gradient in the logits, in the place of the first slope."""
        # With g the gradient in the log-probabilities, the gradient in the logits is g - softmax * sum(g). Terms add to the same g,
        # each its coefficient times its slope, or its coefficient at the sampled token. So one [T, V] buffer and one correction
        # serve all terms, and a slope may be off by a multiple of the softmax, which the correction removes.
        total: Tensor | None = None
        sampled = torch.zeros_like(shares[0])
        for term, share, slope in zip(self._objective.losses, shares, self._slopes, strict=True):
            if slope is None:
                sampled += value_of_token(term, share)
            elif total is None:
                total = slope.mul_(share[:, None])
            else:
                total.addcmul_(slope, share[:, None])
        total = self._tile("logits").zero_() if total is None else total
        gradient_sum = total.sum(dim=-1).add_(sampled)
        total.scatter_add_(-1, self._batch.tokens[:, None], sampled[:, None])
        return total.sub_(self._probs.mul_(gradient_sum[:, None]))


def _gives_distributions(teacher: TeacherSignal, device: torch.device) -> bool:
    """Whether the whole distribution of a teacher, or of every member of a pool of them, can be had on the device."""
    members = (teacher,) if teacher.pool is None else teacher.pool.members
    return all(
        member.head is not None
        and isinstance(member.hidden, Tensor)
        and member.hidden.device == device
        for member in members
    )


def can_fuse(objective: Objective, local: bool = True) -> bool:
    """Return whether the loss can be fused: every term of the objective has a closed form, see `has_closed_form`."""
    return all(has_closed_form(term, local) for term in objective.losses)


def has_closed_form(term: Term, local: bool = True) -> bool:
    """Whether the term's gradient can be written down: a divergence to the teacher as it is, or a sampled token.

    `local`: whether the teacher's hidden states and head are at hand.
    """
    if not term.asks:
        return True
    if term.against != "teacher" or not term.plain_target or isinstance(term.clip, ClipEntries):
        return False
    if term.on_sampled_token:
        whole = local and term.signal.whole and term.divergence.name == "reverse_kl"
        return (term.signal.sampled or whole) and term.baseline != "kl"
    slope = DIVERGENCES[term.divergence.name].slope
    return local and term.signal.whole and isinstance(term.gradient, Pathwise) and slope is not None
