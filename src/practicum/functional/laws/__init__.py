"""The laws that every entry of a table must obey, built-in or user-defined, with counterexamples."""

from practicum.functional.laws.checking import LawCheck, check_laws
from practicum.functional.laws.divergences import DIVERGENCE_LAWS
from practicum.functional.laws.factors import (
    ADVANTAGE_LAWS,
    CORRECTION_LAWS,
    REWARD_LAWS,
    SAMPLE_WEIGHT_LAWS,
    WEIGHT_LAWS,
)

__all__ = [
    "ADVANTAGE_LAWS",
    "CORRECTION_LAWS",
    "DIVERGENCE_LAWS",
    "REWARD_LAWS",
    "SAMPLE_WEIGHT_LAWS",
    "WEIGHT_LAWS",
    "LawCheck",
    "check_laws",
]
