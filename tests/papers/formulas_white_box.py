"""The losses of sections on white-box distillation, as their papers write them."""

from torch import Tensor

from .case import Case, jsd


def gkd(case: Case) -> Tensor:
    """Equation 1 of 2306.13649 with beta 1/2: the token mean of JSD on whichever answers there are."""
    return case.token_mean(lambda token: jsd(token.S, token.T, 0.5))
