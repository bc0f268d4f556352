"""Sample extra tokens from the student at each position."""

from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.objective.distribution import DrawnTokens
from practicum.objective.estimator_call import EstimatorCall, ScoreFunction
from practicum.objective.signal_call import Full, SignalCall


class Config(SignalCall):
    """K extra tokens sampled from the student at each position, scored by the teacher.
    AsyncOPD 2606.24143.
    """

    type: Literal["mc"] = "mc"
    k: int = Field(default=16, ge=1)
    usual: ClassVar[EstimatorCall] = ScoreFunction()

    @property
    def question(self) -> Full:
        """Return the full distribution, which is used to score the sampled tokens."""
        return Full()

    @property
    def drawn(self) -> int:
        """Return k."""
        return self.k

    def compute_drawn_loss(self, sample: DrawnTokens) -> Float[Tensor, " T"]:
        """Return the score function of the drawn tokens."""
        logprobs = sample.student.gather(-1, sample.ids)
        advantage = sample.compute_advantage(
            logprobs.detach(), sample.teacher.gather(-1, sample.ids)
        )
        return -(advantage * logprobs).mean(dim=-1)

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse every estimator except a score function."""
        if isinstance(gradient, ScoreFunction):
            return None
        return (
            "signal 'mc' only has sampled tokens, and no exact divergence; set estimator: "
            "score_function"
        )
