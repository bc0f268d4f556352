"""Pairs of a prompt's completions."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from practicum.functional.pairs import PAIR_LOSSES, PairLoss
from practicum.objective.estimator_call import EstimatorCall, ScoreFunction
from practicum.objective.signal_call import Capabilities, Sampled, SignalCall


class Config(SignalCall):
    """Pairs of a chosen and a rejected completion of a prompt.

    `loss`: dpo 2305.18290, ipo and ipo_sum 2310.12036, simpo 2405.14734, orpo 2403.07691, spin
    2401.01335; `against` has the model of the ratio for all but simpo and orpo. `choose` prefers, by
    source, completions of dataset and teacher to completions of student and reference; by reward, the
    higher reward; by low_reward, the lower reward (AlignDistil 2503.02832); by score, the higher mean
    log-probability under the model of `against`.
    """

    type: Literal["pair"] = "pair"
    loss: Literal["dpo", "ipo", "ipo_sum", "simpo", "orpo", "spin"] = "dpo"
    beta: float | None = Field(default=None, gt=0)
    choose: Literal["source", "reward", "low_reward", "score"] = "source"
    margin: float | None = Field(default=None, ge=0)
    pairs: ClassVar[bool] = True
    usual: ClassVar[EstimatorCall] = ScoreFunction()

    @model_validator(mode="after")
    def _check_parameters(self) -> "Config":
        self.entry.resolve(self.beta, self.margin)
        return self

    @property
    def entry(self) -> PairLoss:
        """Return the loss with its facts."""
        return PAIR_LOSSES[self.loss]

    @property
    def question(self) -> Sampled | None:
        """Return the log-probabilities of the tokens, if the loss or the choice needs them."""
        return Sampled() if self.entry.needs_reference or self.choose == "score" else None

    def explain_refusal(self, capabilities: Capabilities) -> str | None:
        """Refuse also several members with a loss each: a pair has one ratio."""
        if problem := super().explain_refusal(capabilities):
            return problem
        if not capabilities.splits_answers:
            return None
        return (
            "adds up the losses of its members, and a loss of pairs is no sum over teachers; set "
            "kind: geometric in the pool, which averages the members' log-probabilities"
        )

    @property
    def by_reward(self) -> bool:
        """Return True if the reward chooses the pairs."""
        return self.choose in ("reward", "low_reward")

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse settings that concern one completion at a time."""
        if divergence == "reverse_kl" and plain and gradient == ScoreFunction():
            return None
        return (
            "signal 'pair' defines its own loss; leave out target, divergence and estimator, and "
            f"write pair(LOSS) with LOSS one of {', '.join(PAIR_LOSSES)}"
        )
