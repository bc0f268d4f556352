"""The rollout's own tokens are the label."""

from typing import ClassVar, Literal

from practicum.objective.estimator_call import EstimatorCall
from practicum.objective.signal_call import SignalCall


class Config(SignalCall):
    """The rollout's own tokens are the label, for any writer; no teacher is needed.
    SFT, SeqKD 1606.07947.
    """

    type: Literal["text"] = "text"
    label: ClassVar[bool] = True

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse everything but the cross-entropy of the label."""
        if divergence != "ce":
            return "signal 'text' has one label per token, the token itself; set divergence: ce"
        if not gradient.pathwise or not plain:
            return (
                "signal 'text' is its own target and is differentiated itself; "
                "leave out target and estimator"
            )
        return None
