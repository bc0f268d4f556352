"""A fixed advantage for unlikely tokens."""

import math
from typing import ClassVar, Literal

from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.objective.estimator_call import EstimatorCall, ScoreFunction
from practicum.objective.signal_call import SignalCall


class Config(SignalCall):
    """A fixed `advantage` for tokens that the student finds less likely than `threshold`.
    No teacher and no reward is needed: a control that shows the effect of a teacher (2608.31046).
    """

    type: Literal["unlikely"] = "unlikely"
    threshold: float = Field(default=0.1, gt=0, lt=1)
    advantage: float = -1.0
    sampled: ClassVar[bool] = True
    usual: ClassVar[EstimatorCall] = ScoreFunction()

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse settings that concern a teacher."""
        if divergence == "reverse_kl" and plain and gradient == ScoreFunction():
            return None
        return (
            "signal 'unlikely' asks no teacher; leave out target, divergence and estimator, and "
            "write unlikely(0.1, -1)"
        )

    def explain_extras(self, *, has_reward: bool, clip: str, source: str) -> str | None:
        """Refuse a reward in addition to the fixed advantage."""
        if has_reward:
            return "signal 'unlikely' has a fixed advantage; leave out reward"
        return None

    def compute_fixed_advantage(self, logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Return the advantage at unlikely tokens, 0 elsewhere."""
        return self.advantage * (logprobs < math.log(self.threshold)).to(logprobs)
