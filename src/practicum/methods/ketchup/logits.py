"""Use the teacher's raw logits as values of tokens."""

from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.objective.distribution import TeacherDistribution
from practicum.objective.estimator_call import EstimatorCall, ScoreFunction
from practicum.objective.signal_call import Capabilities, Full, SignalCall


class Config(SignalCall):
    """The teacher's raw logits as token values, with K-step returns (KETCHUP 2504.19024).

    The return of a token is its logit minus the value of the state K tokens later, plus the logit of
    the token at that state minus the value another K tokens later, and so on. After the last token
    the value is 0. The `value` of a state is its largest logit (`max`) or the log-sum-exp of its
    logits (`soft`).
    """

    type: Literal["logits"] = "logits"
    k: int = Field(default=4, ge=1)
    value: Literal["max", "soft"] = "max"
    sampled: ClassVar[bool] = True
    usual: ClassVar[EstimatorCall] = ScoreFunction()

    @property
    def question(self) -> Full:
        """Return the full distribution, which includes the head that computes the logits."""
        return Full()

    @property
    def step(self) -> int:
        """Return k."""
        return self.k

    def explain_refusal(self, capabilities: Capabilities) -> str | None:
        """Refuse a teacher that only returns log-probabilities, in addition to the usual checks."""
        if problem := super().explain_refusal(capabilities):
            return problem
        if capabilities.raw_logits:
            return None
        return (
            "gives log-probabilities and no raw logits; set signal: sampled with estimator: "
            "score_function(gamma=1), or use a teacher of type model or self"
        )

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse settings that change the return; a group baseline does not change it."""
        baselines = (ScoreFunction(), ScoreFunction(baseline="group_mean"))
        if divergence == "reverse_kl" and plain and gradient in baselines:
            return None
        return (
            "signal 'logits' defines its own return; leave out target and divergence, and set "
            "estimator: score_function(baseline=group_mean), or no estimator"
        )

    def compute_state_values(self, teacher: TeacherDistribution) -> Float[Tensor, " T"] | None:
        """Return the largest logit of each state, or the log-sum-exp of its logits."""
        assert teacher.full is not None and teacher.level is not None
        if self.value == "soft":
            return teacher.level
        # The bucket of other tokens is not one token.
        tokens = teacher.full if teacher.outside is None else teacher.full[:, :-1]
        return teacher.level + tokens.amax(dim=-1)
