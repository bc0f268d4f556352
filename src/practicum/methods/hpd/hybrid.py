"""Weigh the text's token and one token of the student by their shares of two KL divergences."""

from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.objective.distribution import DrawnTokens
from practicum.objective.estimator_call import EstimatorCall, ScoreFunction
from practicum.objective.signal_call import Full, SignalCall


class Config(SignalCall):
    """The text's token, and one sampled from the student, by their parts of two KL (HPD 2604.20244)."""

    type: Literal["hybrid"] = "hybrid"
    usual: ClassVar[EstimatorCall] = ScoreFunction()

    @property
    def question(self) -> Full:
        """Return the full distribution, which is used to score the sampled token."""
        return Full()

    @property
    def drawn(self) -> int:
        """Return 1."""
        return 1

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse settings of a divergence: both are in the counts."""
        if isinstance(gradient, ScoreFunction) and divergence == "reverse_kl" and plain:
            return None
        return "signal 'hybrid' joins both KL; leave out target, divergence and estimator"

    def compute_drawn_loss(self, sample: DrawnTokens) -> Float[Tensor, " T"]:
        """Return minus the log-probabilities of both tokens, times what they count.

        For the teacher's T and the student's S, the text's token v counts S(v) log T(v)/S(v), its
        part of the reverse KL. If T(v) > S(v), it also counts T(v), its part of the forward KL, and
        T(v) again if the sampled token w has T(w) < S(w). Then w counts S(w) log T(w)/S(w), which
        is negative, unless it is v (released code).
        """
        ids = torch.cat([sample.tokens[:, None], sample.ids], dim=-1)
        student, teacher = sample.student.gather(-1, ids), sample.teacher.gather(-1, ids)
        with torch.no_grad():
            counts = student.exp() * (teacher - student)
            missing, excess = counts[:, 0] > 0, counts[:, 1] < 0
            counts[:, 0] += teacher[:, 0].exp() * (
                missing.to(counts) + (missing & excess).to(counts)
            )
            counts[:, 1] *= excess & (ids[:, 1] != ids[:, 0])
        return -(counts * student).sum(dim=-1)
