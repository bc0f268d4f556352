"""Extra tokens are drawn from the student at each state."""

from typing import ClassVar, Literal

from pydantic import Field

from practicum.objective.estimator_call import EstimatorCall, ScoreFunction
from practicum.objective.signal_call import Full, SignalCall


class Config(SignalCall):
    """K extra tokens drawn from the student at each state, scored by the teacher.
    AsyncOPD 2606.24143.
    """

    type: Literal["mc"] = "mc"
    k: int = Field(default=16, ge=1)
    usual: ClassVar[EstimatorCall] = ScoreFunction()

    @property
    def question(self) -> Full:
        """Return the full distribution, from which the drawn tokens are scored."""
        return Full()

    @property
    def drawn(self) -> int:
        """Return k."""
        return self.k

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse every estimator but a score function."""
        if isinstance(gradient, ScoreFunction):
            return None
        return (
            "signal 'mc' has drawn tokens, which no divergence is a sum over; write estimator: "
            "score_function"
        )
