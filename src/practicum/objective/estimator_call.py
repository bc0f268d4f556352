"""The base of all estimators of a term: how disagreement becomes a gradient.

An estimator is one file of `practicum.objective.estimators`, or a module of another package, with a
class `Config` below `EstimatorCall`.
"""

from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import BeforeValidator, Field, SerializeAsAny, WithJsonSchema
from torch import Tensor

from practicum import functional as F
from practicum.core.calls import Call
from practicum.core.plugins import PLUGIN_KEY, read_part
from practicum.objective.distribution import EXAMPLE, check_shape

ESTIMATORS = "practicum.objective.estimators"
"""The package with the estimators, one file each."""


class EstimatorCall(Call):
    """An estimator, with the facts that decide where it can be used.

    - pathwise: it differentiates the divergence itself, not the log-probability of a token
    - over_candidates: it sums over the candidates of a topk signal
    - subtracts: the baseline of its returns
    - accumulates: a token's return depends on other tokens' advantages, see `compute_returns`
    """

    pathwise: ClassVar[bool] = False

    @property
    def over_candidates(self) -> bool:
        """Return True if it sums over the candidates of a topk signal."""
        return False

    @property
    def subtracts(self) -> Literal["none", "kl", "group_mean"]:
        """Return the baseline that is subtracted from each token's return."""
        return "none"

    @property
    def accumulates(self) -> bool:
        """Return True if the return of a token depends on other tokens' advantages."""
        return False

    def resolve(self, usual: "EstimatorCall") -> "EstimatorCall":
        """Return the estimator itself, or the `usual` one of a signal in its place."""
        return self

    def explain_misuse(self, divergence: str, candidates: int) -> str | None:
        """Explain why it does not support a divergence or this many candidates, or return None."""
        return None

    def compute_returns(
        self, advantages: Float[Tensor, " T"], turns: Int[Tensor, " T"]
    ) -> Float[Tensor, " T"]:
        """Return the return of each token of one completion. It is called if `accumulates` is True.

        `turns` is the number of each token's turn in its conversation.
        """
        raise NotImplementedError

    def try_out(self) -> None:
        """Add up the advantages of three tokens."""
        if self.accumulates:
            turns = torch.zeros(3, dtype=torch.long)
            check_shape("compute_returns", self.compute_returns(EXAMPLE[0], turns), (3,))


class Auto(EstimatorCall):
    """Pathwise if there are candidates to differentiate, score_function for sampled signals."""

    type: Literal["auto"] = "auto"

    def resolve(self, usual: EstimatorCall) -> EstimatorCall:
        """Return the usual estimator of the signal."""
        return usual


class Pathwise(EstimatorCall):
    """Differentiate the divergence itself at every visited state (GKD 2306.13649)."""

    type: Literal["pathwise"] = "pathwise"
    pathwise: ClassVar[bool] = True


class ScoreFunction(EstimatorCall):
    """Policy gradient with the advantage of the sampled token.
    `gamma` 1 is the sequence-level gradient.

    `baseline`: none; kl, the full divergence at the state (vOPD 2605.07865); group_mean, the mean
    return of the prompt's remaining completions. `start` 1 begins the return at the next token, for
    use with a pathwise term at the current token, and `length` mean divides it by the number of
    remaining tokens (MiniLLM 2306.08543). `over` candidates sums over the candidates of a topk
    signal, each with its renormalised student probability (2604.13016). `unit` turn adds up the rest
    of the turn, and the later turns of a conversation, discounted by `gamma` per turn.
    """

    type: Literal["score_function"] = "score_function"
    gamma: float = Field(default=0.0, ge=0, le=1)
    baseline: Literal["none", "kl", "group_mean"] = "none"
    start: Literal[0, 1] = 0
    length: Literal["sum", "mean"] = "sum"
    over: Literal["sampled", "candidates"] = "sampled"
    unit: Literal["token", "turn"] = "token"

    @property
    def over_candidates(self) -> bool:
        """Return True for `over=candidates`."""
        return self.over == "candidates"

    @property
    def subtracts(self) -> Literal["none", "kl", "group_mean"]:
        """Return the baseline."""
        return self.baseline

    @property
    def accumulates(self) -> bool:
        """Return True with a discount above 0, or by turn."""
        return self.gamma > 0 or self.unit == "turn"

    def explain_misuse(self, divergence: str, candidates: int) -> str | None:
        """Refuse arguments that contradict each other, or candidates that the signal does not have."""
        if self.unit == "turn" and (self.start, self.length) != (0, "sum"):
            return "unit=turn adds up the rest of a turn; leave out start and length"
        if self.over != "candidates":
            return None
        if not candidates:
            return "over=candidates sums over the candidates of a topk signal; set signal: topk(16)"
        if self.accumulates or self.baseline != "none":
            return "over=candidates is about one state at a time; leave out gamma and baseline"
        return None

    def compute_returns(
        self, advantages: Float[Tensor, " T"], turns: Int[Tensor, " T"]
    ) -> Float[Tensor, " T"]:
        """Return the discounted advantages from each token on, or from the next one on.

        They are a sum, or a mean over the remaining tokens; by turn, a sum over turns.
        """
        if self.unit == "turn":
            return F.turn_returns(advantages, turns, self.gamma)
        returns = F.reward_to_go(advantages, self.gamma)
        num_left = torch.arange(len(advantages), 0, -1).to(returns) - self.start
        if self.start == 1:
            returns = returns - advantages
        return returns / num_left.clamp_min(1.0) if self.length == "mean" else returns


Estimator = Annotated[
    SerializeAsAny[EstimatorCall],
    BeforeValidator(partial(read_part, ESTIMATORS, EstimatorCall)),
    WithJsonSchema({PLUGIN_KEY: ESTIMATORS}),
]
"""An estimator in a recipe."""
