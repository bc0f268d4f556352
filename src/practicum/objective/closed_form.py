"""The logit side with its gradient at hand: for the usual objectives, nothing is differentiated twice.

Log-probabilities are made in place of the logits, each exponential is taken once, and the gradient of the logits is written
down instead of asked of autograd, so that a chunk costs little more than its matrix products. Objectives with another kind
of term (candidates, drawn tokens, mixed targets) go through `logit_side`, with the same result.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from practicum import functional as F
from practicum.functional.divergences import DIVERGENCES, Pair, floored, inner
from practicum.functional.precision import IMPOSSIBLE, finite
from practicum.objective.choices import ClipLoss, Full, Pathwise, Sampled, Text
from practicum.objective.sides import TeacherTokens, TermValues, TokenBatch, logit_side, teacher_rank
from practicum.objective.spec import Objective, Term


class LogitSide:
    """One chunk's logits: `values` for the token side, and the gradient once it has answered."""

    def __init__(
        self,
        logits: Float[Tensor, "T V"],
        teacher: TeacherTokens,
        batch: TokenBatch,
        objective: Objective,
        reference: TeacherTokens | None = None,
    ) -> None:
        self._logits = logits
        self._batch = batch
        self._objective = objective
        self.values: list[TermValues]
        if teacher.full is not None and all(has_closed_form(term) for term in objective.losses):
            self._slopes = self._written_down(teacher.full)
        else:
            self._slopes = None
            self._leaf = torch.log_softmax(logits.detach(), dim=-1).requires_grad_()
            self._attached = logit_side(self._leaf, teacher, batch, objective, reference)
            self.values = [value.detached() for value in self._attached]

    def backward(self, shares: Sequence[Float[Tensor, " T"]]) -> None:
        """Add up the gradient of `sum(share * value)` over the terms, and hand it to the graph behind the logits."""
        torch.autograd.backward(self._logits, self.gradient(shares))

    @torch.no_grad()
    def gradient(self, shares: Sequence[Float[Tensor, " T"]]) -> Float[Tensor, "T V"]:
        """That gradient, in the logits."""
        shares = [share.to(self._logits) for share in shares]
        if self._slopes is None:
            return self._differentiated(shares)
        return self._assembled(shares, self._slopes)

    @torch.no_grad()
    def _written_down(self, teacher: Tensor) -> list[Tensor | None]:
        """The slope of each term, None for a term on the sampled token; the logits become log-probabilities in place."""
        student = self._logits.detach()
        student.sub_(student.amax(dim=-1, keepdim=True))
        probs = student.exp()
        total = probs.sum(dim=-1, keepdim=True)
        probs.div_(total)
        student.sub_(total.log_())
        teacher = teacher if teacher.amin() > IMPOSSIBLE else finite(teacher)
        pair = Pair(student, probs, teacher, teacher.exp())
        self._probs = probs
        found = [_value_and_slope(term, pair) for term in self._objective.losses]
        self.values = self._values(pair, [value for value, _ in found])
        return [slope for _, slope in found]

    def _values(self, pair: Pair, divergences: Sequence[Tensor | None]) -> list[TermValues]:
        tokens = self._batch.tokens
        logprobs, teacher_logprobs = F.gather_logprobs(pair.student, tokens), F.gather_logprobs(pair.teacher, tokens)
        entropies = -inner(pair.student_probs, pair.student), -inner(pair.teacher_probs, pair.teacher)
        reverse_kl = _yardstick(self._objective, pair, divergences)
        values = []
        for term, divergence in zip(self._objective.losses, divergences, strict=True):
            value = divergence if divergence is not None else -logprobs if isinstance(term.signal, Text) else logprobs
            if term.on_sampled_token and isinstance(term.signal, Full):
                divergence = reverse_kl
            term_values = TermValues(
                value=value,
                answered=torch.ones_like(logprobs, dtype=torch.bool),
                logprobs=logprobs,
                teacher_logprobs=teacher_logprobs if term.asks else None,
                divergence=divergence,
                student_entropy=entropies[0],
                teacher_entropy=entropies[1],
                reverse_kl=reverse_kl,
                teacher_rank=teacher_rank(term, pair.teacher, tokens),
            )
            values.append(term_values.detached())
        return values

    def _differentiated(self, shares: Sequence[Tensor]) -> Tensor:
        """The gradient by autograd, through log-probabilities that are a leaf."""
        with torch.enable_grad():
            loss = torch.stack(
                [(share * value.value).sum() for share, value in zip(shares, self._attached, strict=True)]
            ).sum()
        (slope,) = torch.autograd.grad(loss, self._leaf)
        return slope.sub_(self._leaf.detach().exp().mul_(slope.sum(dim=-1, keepdim=True)))

    def _assembled(self, shares: Sequence[Tensor], slopes: Sequence[Tensor | None]) -> Tensor:
        """The gradient from the terms' slopes, in the place of the first of them."""
        total: Tensor | None = None
        sampled = torch.zeros_like(shares[0])
        for term, share, slope in zip(self._objective.losses, shares, slopes, strict=True):
            if slope is None:
                sampled += -share if isinstance(term.signal, Text) else share
            elif total is None:
                total = slope.mul_(share[:, None])
            else:
                total.addcmul_(slope, share[:, None])
        total = torch.zeros_like(self._probs) if total is None else total
        drift = total.sum(dim=-1) + sampled
        total.scatter_add_(-1, self._batch.tokens[:, None], sampled[:, None])
        return total.sub_(self._probs.mul_(drift[:, None]))


def has_closed_form(term: Term) -> bool:
    """Whether the term's gradient can be written down: a divergence to the teacher as it is, or a sampled token."""
    if not term.asks:
        return True
    if term.against != "teacher" or not term.plain_target:
        return False
    if term.on_sampled_token:
        known = isinstance(term.signal, Sampled) or (
            isinstance(term.signal, Full) and term.divergence.name == "reverse_kl"
        )
        return known and term.baseline != "kl"
    slope = DIVERGENCES[term.divergence.name].slope
    return isinstance(term.signal, Full) and isinstance(term.gradient, Pathwise) and slope is not None


def _value_and_slope(term: Term, pair: Pair) -> tuple[Tensor | None, Tensor | None]:
    if not isinstance(term.gradient, Pathwise) or isinstance(term.signal, Text):
        return None, None
    entry = DIVERGENCES[term.divergence.name]
    assert entry.slope is not None, "only terms with a closed form come here"
    value, slope = entry.slope(pair, entry.resolve(term.parameter))
    if isinstance(term.clip, ClipLoss):
        slope.mul_((value <= term.clip.maximum).to(slope)[:, None])
    return value, slope


def _yardstick(objective: Objective, pair: Pair, divergences: Sequence[Tensor | None]) -> Tensor:
    """Reverse KL to the teacher, taken from a term that has it or else measured."""
    for term, divergence in zip(objective.losses, divergences, strict=True):
        if term.divergence.name == "reverse_kl" and divergence is not None:
            return divergence
    return inner(pair.student_probs, pair.student - floored(pair.student, pair.teacher))
