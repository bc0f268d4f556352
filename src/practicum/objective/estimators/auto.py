"""The usual estimator of the signal."""

from typing import Literal

from practicum.objective.estimator_call import EstimatorCall


class Config(EstimatorCall):
    """Pathwise if there are candidates to differentiate, score_function for sampled signals."""

    type: Literal["auto"] = "auto"

    def resolve(self, usual: EstimatorCall) -> EstimatorCall:
        """Return the usual estimator of the signal."""
        return usual
