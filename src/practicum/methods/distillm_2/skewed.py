"""Mix the two models more where the writer of an answer is much surer of it, as DistiLLM-2 does."""

import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.functional.precision import finite
from practicum.objective.distribution import SignalComparison
from practicum.objective.estimator_call import EstimatorCall
from practicum.objective.signal_call import ANSWERS, Full
from practicum.objective.states_signal import StatesSignal
from practicum.types import Metrics, Rollout, TokenRecord

SMALLEST = 0.01
"""The smallest alpha, as in the released code."""


class Config(StatesSignal):
    """A skew KL with an `alpha` for each answer (DistiLLM-2 2503.07067).

    With `forward_kl` it is KL(T || alpha T + (1 - alpha) S), with `reverse_kl` KL(S || (1 - alpha) T +
    alpha S) with the mixture held constant. The alpha of an answer keeps (1 - alpha) times its gap at
    its value for the run's first answers, `anchor`: the gap is how much more likely the writer finds
    a token of the answer than the other model. `alpha` is the largest, and all of them without an
    anchor. Metrics: `gap_of_teacher` and `gap_of_student`, by writer.
    """

    type: Literal["skewed"] = "skewed"
    alpha: float = Field(default=0.1, gt=SMALLEST, lt=1)
    anchor: float = 0.0
    measures: ClassVar[bool] = True
    compares: ClassVar[bool] = True
    reads_answers: ClassVar[bool] = True

    @property
    def question(self) -> Full:
        """Return the full distribution."""
        return Full()

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse also every divergence but the two KLs."""
        if problem := super().explain_conflict(gradient, divergence, plain):
            return problem
        if divergence in ("forward_kl", "reverse_kl"):
            return None
        return "signal 'skewed' mixes one KL; set divergence: forward_kl or reverse_kl"

    def compare(self, comparison: SignalComparison) -> Float[Tensor, " T"]:
        """Return the skew KL at each token, with the alpha of its answer."""
        full, answers = comparison.teacher.full, comparison.teacher.extras.get(ANSWERS)
        assert full is not None, "the signal asks for whole distributions"
        student, teacher = finite(comparison.student), finite(full)
        is_forward = comparison.divergence.name == "forward_kl"
        alpha = torch.full_like(student[:, 0].detach(), self.alpha)
        if answers is not None:
            gap = (answers[:, 1] - answers[:, 0]) * (1.0 if is_forward else -1.0)
            alpha = compute_alpha(gap.to(alpha), self.anchor, self.alpha)
        log_rest = alpha.neg().log1p()[:, None]
        log_alpha = alpha.log()[:, None]
        if is_forward:
            student = torch.logaddexp(log_alpha + teacher, log_rest + student)
        else:
            teacher = torch.logaddexp(log_rest + teacher, log_alpha + student.detach())
        return comparison.contributions(student, teacher).sum(dim=-1)

    def measure(self, rollouts: Sequence[Rollout], outputs: TokenRecord) -> Metrics:
        """Return the mean gap of the teacher's answers and of the student's."""
        gaps: dict[str, list[float]] = {}
        for rollout, record in zip(rollouts, outputs.split(rollouts), strict=True):
            student, teacher = (
                float(column.nanmean().exp())
                for column in (record.logprobs, record.teacher_logprobs)
            )
            sign = {"teacher": 1.0, "student": -1.0}.get(rollout.source, math.nan)
            if math.isfinite(gap := sign * (teacher - student)):
                gaps.setdefault(f"gap_of_{rollout.source}", []).append(gap)
        return {name: sum(values) / len(values) for name, values in gaps.items()}


def compute_alpha(gap: Float[Tensor, " T"], anchor: float, largest: float) -> Float[Tensor, " T"]:
    """Return 1 - (1 - largest) anchor / gap, between `SMALLEST` and `largest`.

    An answer with a gap of `anchor` or more, or that the other model finds likelier, has `largest`.
    """
    # Released code: the small number keeps a gap of 0 from a division by 0.
    ratio = anchor / (gap + 1e-5)
    return (1.0 - (1.0 - largest) * ratio).nan_to_num(largest).clamp(SMALLEST, largest)
