"""The objective as data, its logit side and its token side."""

from practicum.objective.sides import TeacherTokens, TermValues, TokenBatch, logit_side, token_batch, token_side
from practicum.objective.spec import (
    AXES,
    Full,
    K2Surrogate,
    LogLinear,
    Mixture,
    Objective,
    Pathwise,
    Sampled,
    ScoreFunction,
    Signal,
    TeacherTarget,
    Term,
    TopK,
)

__all__ = [
    "AXES",
    "Full",
    "K2Surrogate",
    "LogLinear",
    "Mixture",
    "Objective",
    "Pathwise",
    "Sampled",
    "ScoreFunction",
    "Signal",
    "TeacherTarget",
    "TeacherTokens",
    "Term",
    "TermValues",
    "TokenBatch",
    "TopK",
    "logit_side",
    "token_batch",
    "token_side",
]
