"""Losses of pairs of answers, and losses of whole answers, as their papers write them."""

from collections.abc import Callable

import torch
from torch import Tensor

from .case import Case, Sequence


def log_ratio(row: Sequence) -> Tensor:
    """Return log pi(y | x) / pi_ref(y | x)."""
    return sum((token.lS - token.lR for token in row.tokens), torch.zeros(()))


def preferred_by_source(one: Sequence, other: Sequence) -> bool:
    """Return whether the first is of dataset or teacher and the second of student or reference."""
    return one.source in ("dataset", "teacher") and other.source in ("student", "reference")


def mean_over_pairs(
    case: Case,
    prefers: Callable[[Sequence, Sequence], bool],
    loss: Callable[[Sequence, Sequence], Tensor],
) -> Tensor:
    """Return the mean of a loss over all pairs of a prompt's answers where one answer is preferred."""
    losses = [
        loss(one, other)
        for group in case.groups()
        for one in group
        for other in group
        if prefers(one, other)
    ]
    return sum(losses, torch.zeros(())) / len(losses)


def dpo(case: Case) -> Tensor:
    """Equation 7 of 2305.18290: -log sigma(beta log pi/pi_ref(y_w) - beta log pi/pi_ref(y_l))."""

    def loss(chosen: Sequence, rejected: Sequence) -> Tensor:
        return -torch.log(torch.sigmoid(0.5 * log_ratio(chosen) - 0.5 * log_ratio(rejected)))

    return mean_over_pairs(case, lambda one, other: one.reward > other.reward, loss)


def orpo_distill(case: Case) -> Tensor:
    """2509.25100 with equations 4 to 7 of ORPO, 2403.07691: likelihood of the teacher's answers and the odds ratio.

    Every prompt has three answers and one of them is the teacher's, so the number of prompts is a third of the answers.
    """

    def mean(row: Sequence) -> Tensor:
        return sum((token.lS for token in row.tokens), torch.zeros(())) / len(row.tokens)

    def odds(row: Sequence) -> Tensor:
        p = torch.exp(mean(row))
        return p / (1 - p)

    def loss(chosen: Sequence, rejected: Sequence) -> Tensor:
        return -torch.log(torch.sigmoid(torch.log(odds(chosen) / odds(rejected))))

    prompts = len(case.sequences) / 3
    likelihood = sum(-mean(row) for row in case.sequences if row.source == "teacher") / prompts
    return likelihood + 0.3 * mean_over_pairs(case, preferred_by_source, loss)


def spin(case: Case) -> Tensor:
    """Equation 4.7 of 2401.01335 with the logistic loss l(t) = log(1 + exp(-t)) and lambda 1."""

    def loss(data: Sequence, generated: Sequence) -> Tensor:
        t = log_ratio(data) - log_ratio(generated)
        return torch.log(1 + torch.exp(-t))

    return mean_over_pairs(case, preferred_by_source, loss)
