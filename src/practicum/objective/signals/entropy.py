"""The student's entropy at each token."""

from typing import ClassVar, Literal

from practicum.objective.estimator_call import EstimatorCall, Pathwise
from practicum.objective.signal_call import SignalCall


class Config(SignalCall):
    """The student's entropy at each token, to be raised; no teacher and no reward is needed.
    The bonus of equation 9 of PPO (1707.06347); its c2 is the coefficient.
    """

    type: Literal["entropy"] = "entropy"
    alone: ClassVar[bool] = True

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse settings that concern a teacher."""
        if divergence == "reverse_kl" and plain and gradient == Pathwise():
            return None
        return (
            "signal 'entropy' asks no teacher and is differentiated itself; leave out target, "
            "divergence and estimator"
        )
