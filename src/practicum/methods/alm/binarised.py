"""Compare the probability of a sampled span with all other outcomes (ALM 2503.20083)."""

from typing import ClassVar, Literal

from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from practicum.functional.binarised import binarised_advantage
from practicum.functional.sequence import sum_spans
from practicum.objective.distribution import SignalComparison
from practicum.objective.estimator_call import EstimatorCall
from practicum.objective.signal_call import Sampled, SignalCall


class Config(SignalCall):
    """The divergence of two Bernoulli variables: the sampled span or any other text, differentiated.
    Both have probability p ** (1 / `tau`). ALM 2503.20083.
    """

    type: Literal["binarised"] = "binarised"
    tau: float = Field(default=1.0, gt=0)
    sampled: ClassVar[bool] = True
    differentiates_token: ClassVar[bool] = True

    @property
    def question(self) -> Sampled:
        """Return the log-probabilities of sampled tokens."""
        return Sampled()

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse every estimator except the derivative itself."""
        if gradient.pathwise and plain:
            return None
        return (
            "signal 'binarised' differentiates a divergence to the teacher itself; leave out "
            "target and estimator"
        )

    def explain_extras(self, *, has_reward: bool, clip: str, source: str) -> str | None:
        """Refuse a reward and a clip."""
        if has_reward or clip != "none":
            return "signal 'binarised' is a divergence of spans; leave out reward and clip"
        return None

    def compute_span_advantage(
        self, comparison: SignalComparison, spans: Int[Tensor, " T"] | None
    ) -> Float[Tensor, " T"]:
        """Return the advantage of a Bernoulli variable, which needs the span's probability."""
        student, teacher = comparison.student, comparison.teacher.logprobs
        assert teacher is not None
        if spans is not None:
            student, teacher = sum_spans(student, spans), sum_spans(teacher, spans)
        divergence, parameter = comparison.divergence, comparison.parameter
        return binarised_advantage(divergence, student, teacher, self.tau, parameter)
