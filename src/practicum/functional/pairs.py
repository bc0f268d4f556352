"""Losses of a chosen and a rejected answer to the same prompt.

Each loss is a function of the difference between a number of the chosen answer and the same number
of the rejected one. So its gradient is one coefficient for each token's log-probability: the slope
of the loss in the difference, times the slope of the answer's number in the token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

SMALLEST_COMPLEMENT = 1e-6
"""The smallest probability that the odds leave to other answers, so that the odds are finite."""


@dataclass(frozen=True, slots=True)
class PairLoss:
    """One loss of a pair, with its facts.

    - number: the number of each answer that is compared: `log_ratio`, the sum over tokens of log S
      - log R; `mean_log_ratio`, its mean per token; `mean_logprob`, the mean of log S; `log_odds`,
      log p / (1 - p) with p the geometric mean of the tokens' probabilities
    - value, slope: the loss and its derivative, functions of (difference, beta, margin)
    - beta, margin: the defaults of its parameters; None: it has no such parameter
    """

    name: str
    number: Literal["log_ratio", "mean_log_ratio", "mean_logprob", "log_odds"]
    value: Callable[[Tensor, float, float], Tensor]
    slope: Callable[[Tensor, float, float], Tensor]
    summary: str
    paper: str
    beta: float | None = None
    margin: float | None = None

    @property
    def needs_reference(self) -> bool:
        """True if the answers are compared by their ratio to another model."""
        return self.number in ("log_ratio", "mean_log_ratio")

    def resolve(self, beta: float | None, margin: float | None) -> tuple[float, float]:
        """Return both parameters, the defaults where None is given.

        Raise ValueError for a parameter that the loss does not have.
        """
        for name, value, default in (("beta", beta, self.beta), ("margin", margin, self.margin)):
            if value is not None and default is None:
                raise ValueError(f"pair loss {self.name!r} has no {name}; leave it out")
        # A loss without parameters is the logistic loss of the difference itself.
        defaults = (1.0 if self.beta is None else self.beta, self.margin or 0.0)
        return (
            defaults[0] if beta is None else beta,
            defaults[1] if margin is None else margin,
        )


def _compute_logistic(difference: Tensor, beta: float, margin: float) -> Tensor:
    return -logsigmoid(beta * difference - margin)


def _differentiate_logistic(difference: Tensor, beta: float, margin: float) -> Tensor:
    return -beta * torch.sigmoid(margin - beta * difference)


def _compute_square(difference: Tensor, beta: float, margin: float) -> Tensor:
    return (difference - 1.0 / (2.0 * beta)) ** 2


def _differentiate_square(difference: Tensor, beta: float, margin: float) -> Tensor:
    return 2.0 * (difference - 1.0 / (2.0 * beta))


PAIR_LOSSES = {
    loss.name: loss
    for loss in (
        PairLoss(
            "dpo",
            "log_ratio",
            _compute_logistic,
            _differentiate_logistic,
            "`-log sigmoid(beta d)`",
            "2305.18290",
            beta=0.1,
        ),
        # IPO's authors ran means per token, and TRL computes them for `loss_type="ipo"`; the paper
        # writes the sum.
        PairLoss(
            "ipo",
            "mean_log_ratio",
            _compute_square,
            _differentiate_square,
            "`(d - 1 / (2 beta))^2`, d per token: the preference margin stays bounded",
            "2310.12036",
            beta=0.1,
        ),
        PairLoss(
            "ipo_sum",
            "log_ratio",
            _compute_square,
            _differentiate_square,
            "the same with sums over tokens, as in the paper; longer answers weigh more",
            "2310.12036",
            beta=0.1,
        ),
        PairLoss(
            "simpo",
            "mean_logprob",
            _compute_logistic,
            _differentiate_logistic,
            "`-log sigmoid(beta d - margin)`, without a reference",
            "2405.14734",
            beta=2.0,
            margin=0.5,
        ),
        PairLoss(
            "orpo",
            "log_odds",
            _compute_logistic,
            _differentiate_logistic,
            "`-log sigmoid(d)`, next to a likelihood term for the chosen answer",
            "2403.07691",
        ),
        PairLoss(
            "spin",
            "log_ratio",
            _compute_logistic,
            _differentiate_logistic,
            "DPO's, where the reference is the opponent that wrote the rejected answer",
            "2401.01335",
            beta=0.1,
        ),
    )
}
"""Every loss of a pair by name."""


def pair_loss(
    name: str,
    chosen: Float[Tensor, " P"],
    rejected: Float[Tensor, " P"],
    beta: float | None = None,
    margin: float | None = None,
) -> Float[Tensor, " P"]:
    """Return the loss of each pair from the two answers' numbers; see `PairLoss.number`."""
    loss = PAIR_LOSSES[name]
    return loss.value(chosen - rejected, *loss.resolve(beta, margin))


@dataclass(frozen=True, slots=True)
class Answers:
    """The tokens of `count` answers, packed; `rows` has the answer of each token.

    `reference` is needed by the losses that compare a ratio.
    """

    logprobs: Float[Tensor, " T"]
    rows: Int[Tensor, " T"]
    count: int
    reference: Float[Tensor, " T"] | None = None

    def sum_rows(self, values: Float[Tensor, " T"]) -> Float[Tensor, " R"]:
        """Return the sum of a number over the tokens of each answer."""
        return values.new_zeros(self.count).index_add_(0, self.rows, values)


def measure_answers(name: str, answers: Answers) -> tuple[Float[Tensor, " R"], Float[Tensor, " R"]]:
    """Return the number of each answer that a loss compares, and its slope in each of its tokens.

    For an answer without tokens it is the number of an empty sum.
    """
    number, values = PAIR_LOSSES[name].number, answers.logprobs
    if PAIR_LOSSES[name].needs_reference:
        assert answers.reference is not None, "this loss compares ratios to a reference"
        values = values - answers.reference
    sums = answers.sum_rows(values)
    if number == "log_ratio":
        return sums, torch.ones_like(sums)
    lengths = torch.bincount(answers.rows, minlength=answers.count).clamp_min(1).to(sums)
    mean = sums / lengths
    if number in ("mean_logprob", "mean_log_ratio"):
        return mean, 1.0 / lengths
    complement = (-torch.expm1(mean)).clamp_min(SMALLEST_COMPLEMENT)
    return mean - complement.log(), 1.0 / (complement * lengths)


def pair_coefficients(
    name: str,
    answers: Answers,
    pairs: Int[Tensor, "P 2"],
    beta: float | None = None,
    margin: float | None = None,
) -> Float[Tensor, " T"]:
    """Return the derivative of the mean loss of the pairs in each token's log-probability.

    `pairs` has the rows of the chosen and of the rejected answer. The derivative is 0 at the tokens
    of unpaired answers.
    """
    loss = PAIR_LOSSES[name]
    if not len(pairs):
        return torch.zeros_like(answers.logprobs)
    numbers, slopes = measure_answers(name, answers)
    chosen, rejected = pairs.unbind(dim=1)
    difference = numbers[chosen] - numbers[rejected]
    pulls = loss.slope(difference, *loss.resolve(beta, margin)) / len(pairs)
    by_row = torch.zeros_like(numbers).index_add_(0, chosen, pulls).index_add_(0, rejected, -pulls)
    return (by_row * slopes)[answers.rows]
