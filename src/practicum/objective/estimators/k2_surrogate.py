"""Half the squared log-ratio of a sampled token."""

from typing import Literal

from practicum.objective.estimator_call import EstimatorCall


class Config(EstimatorCall):
    """Back-propagate half the squared log-ratio of a token: exactly the gradient of reverse KL."""

    type: Literal["k2_surrogate"] = "k2_surrogate"

    def explain_misuse(self, divergence: str, candidates: int) -> str | None:
        """Refuse any divergence but reverse KL."""
        if divergence == "reverse_kl":
            return None
        return (
            "estimator 'k2_surrogate' is the gradient of reverse_kl only; set divergence: "
            "reverse_kl"
        )
