"""Compile an objective: resolve every choice of its terms once, before an update.

Later code calls functions and never inspects the type of a term. Each term has a logit side
(`practicum.losses.vocabulary_axis`), a token side (`practicum.losses.token_axis`), and a closed
form if its gradient in the logits has one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from practicum.functional.divergence_entry import DistributionPair, Room
from practicum.functional.divergences import DIVERGENCES
from practicum.losses.token_axis import TokenSide, compile_token_side
from practicum.losses.vocabulary_axis import LogitSide, compile_logit_side
from practicum.objective.spec import Objective, Term

Slope = Callable[[DistributionPair, Tensor, Room], Tensor]
"""Writes the derivative in log S into a matrix and returns the value; see `Divergence.slope`."""


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """The gradient of a term in the logits, known without autograd.

    - slope: the derivative of its divergence, or None if only the sampled token has one
    - reads_kl: the reverse KL is measured although only the sampled token is differentiated
    - needs_states: it needs the teacher's hidden states and its head in this process
    - has_kernel: the divergence is the unclipped reverse KL, for which there is a kernel
    """

    slope: Slope | None
    reads_kl: bool
    needs_states: bool
    has_kernel: bool


@dataclass(frozen=True, slots=True)
class CompiledObjective:
    """The two sides of every term of an objective, in the order of the terms.

    `closed` has the closed form of each term, and is None if one of them has none. `reads_answers`: a
    signal reads the column `ANSWERS`, see `practicum.losses.passes.add_answers`.
    """

    logits: tuple[LogitSide, ...]
    tokens: tuple[TokenSide, ...]
    closed: tuple[ClosedForm, ...] | None
    needs_logits: bool
    needs_own: bool
    needs_sequences: bool
    needs_student_level: bool
    reads_answers: bool

    def read_groups(self, extras: Mapping[str, Tensor]) -> Int[Tensor, " T"] | None:
        """Return the lengths of groups of tokens that are read together; see `SignalCall`."""
        groups = (side.read_groups(extras) for side in self.logits)
        return next((lengths for lengths in groups if lengths is not None), None)

    def fuses(self, has_teacher_states: bool = True) -> bool:
        """Return True if every term has a closed form, with or without the teacher's states."""
        if self.closed is None:
            return False
        return has_teacher_states or not any(form.needs_states for form in self.closed)

    def name_metric(self, name: str, number: int) -> str:
        """Return the name of a metric of one term; it has the term's number if there are several."""
        return f"{name}_{number}" if len(self.logits) > 1 else name


def compile_objective(objective: Objective) -> CompiledObjective:
    """Return the objective with every choice resolved."""
    terms = objective.losses
    closed = [compile_closed_form(term) for term in terms]
    # Either all terms or none: the terms of a chunk share one gradient in the logits.
    usable = tuple(form for form in closed if form is not None)
    return CompiledObjective(
        logits=tuple(map(compile_logit_side, terms)),
        tokens=tuple(map(compile_token_side, terms)),
        closed=usable if len(usable) == len(terms) else None,
        needs_logits=objective.needs_logits,
        needs_own=objective.needs_own,
        needs_sequences=objective.needs_sequences,
        needs_student_level=any(term.signal.needs_student_level for term in terms),
        reads_answers=any(term.signal.reads_answers for term in terms),
    )


def compile_closed_form(term: Term) -> ClosedForm | None:
    """Return the closed form of a term, or None if it has none.

    There is one for a divergence to the unmodified teacher and for a sampled token.
    """
    if not term.needs_signal:
        return ClosedForm(slope=None, reads_kl=False, needs_states=False, has_kernel=False)
    if (
        term.needs_reference
        or term.against != "teacher"
        or not term.targets_teacher
        or term.clip.clips_entries
    ):
        return None
    is_reverse_kl = term.signal.whole and term.divergence.name == "reverse_kl"
    if term.on_sampled_token:
        # The baseline 'kl' needs the divergence of the whole distribution at every token.
        if term.gradient.subtracts == "kl" or not (term.signal.sampled or is_reverse_kl):
            return None
        reads_kl, needs_states = term.signal.whole, not term.signal.sampled
        return ClosedForm(None, reads_kl, needs_states, has_kernel=False)
    slope = _compile_slope(term) if term.signal.whole and term.gradient.pathwise else None
    if slope is None:
        return None
    has_kernel = is_reverse_kl and not term.clip.clips_losses
    return ClosedForm(slope, reads_kl=False, needs_states=True, has_kernel=has_kernel)


def _compile_slope(term: Term) -> Slope | None:
    """Return the derivative of a term's divergence, 0 at clipped tokens; None if it is not known."""
    entry, clip = DIVERGENCES[term.divergence.name], term.clip
    if entry.slope is None:
        return None
    differentiate, parameter = entry.slope, entry.resolve(term.parameter)

    def compute(pair: DistributionPair, out: Tensor, room: Room) -> Tensor:
        value = differentiate(pair, parameter, out, room)
        if clip.clips_losses:
            out.mul_((~clip.find_clipped(value)).to(out)[:, None])
        return value

    return compute
