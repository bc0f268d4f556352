"""Check one entry against the laws of its kind on growing inputs, so the first failure is small."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from practicum.foreign import describe_error
from practicum.functional.advantages import Advantage
from practicum.functional.divergence_entry import Divergence
from practicum.functional.laws.divergences import DIVERGENCE_LAWS
from practicum.functional.laws.factors import (
    ADVANTAGE_LAWS,
    CORRECTION_LAWS,
    REWARD_LAWS,
    SAMPLE_WEIGHT_LAWS,
    WEIGHT_LAWS,
)
from practicum.functional.laws.requirements import LawBroken, normalize, random_logits, show
from practicum.functional.registry import AnyEntry
from practicum.functional.table import Number

LAWS: Mapping[str, Sequence[Callable[..., None]]] = {
    "divergence": DIVERGENCE_LAWS,
    "weight": WEIGHT_LAWS,
    "sample weight": SAMPLE_WEIGHT_LAWS,
    "correction": CORRECTION_LAWS,
    "advantage": ADVANTAGE_LAWS,
    "reward": REWARD_LAWS,
}
"""The laws of the entries of each kind."""

SHAPES = ((1, 2), (1, 3), (2, 5), (3, 8))
"""Positions and vocabulary of the inputs of divergences, the smallest first."""
SCALES = (0.5, 1.5, 3.0)
LENGTHS = (1, 2, 3, 5, 12)
SEEDS = (0, 1, 2)


Case = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class LawCheck:
    """A law with its statement, and the smallest input that breaks it; None if it holds."""

    law: str
    statement: str
    counterexample: str | None

    @property
    def holds(self) -> bool:
        """Return True if no input broke the law."""
        return self.counterexample is None


def check_laws(kind: str, entry: AnyEntry, arguments: Mapping[str, Number]) -> list[LawCheck]:
    """Check an entry of a kind, such as `weight`, against its laws; missing arguments have their
    default.

    Without an argument, a divergence with a parameter is also checked at two other values.
    """
    return [judge_law(law, entry, arguments) for law in LAWS[kind]]


def judge_law(
    law: Callable[..., None], entry: AnyEntry, arguments: Mapping[str, Number]
) -> LawCheck:
    """Check a law for an entry; the result has the first and smallest case that breaks it."""
    statement = (inspect.getdoc(law) or "").partition("\n\n")[0]
    for words, inputs in _list_cases(entry, arguments):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                law(entry, *inputs)
        except LawBroken as broken:
            return LawCheck(law.__name__, statement, f"{words}: {broken}")
        except Exception as error:
            # A user-defined entry may raise anything.
            return LawCheck(law.__name__, statement, f"{words}: it raises {describe_error(error)}")
    return LawCheck(law.__name__, statement, None)


def _list_cases(entry: AnyEntry, arguments: Mapping[str, Number]) -> Iterator[Case]:
    """Return the laws' inputs in addition to the entry, each with a description, smallest first."""
    if isinstance(entry, Divergence):
        return _list_divergence_cases(entry, arguments)
    defaults = {} if isinstance(entry, Advantage) else entry.defaults
    return _list_factor_cases({**defaults, **arguments})


def _list_divergence_cases(entry: Divergence, arguments: Mapping[str, Number]) -> Iterator[Case]:
    for positions, vocabulary in SHAPES:
        for parameter in _choose_parameters(entry, arguments):
            for seed, scale in enumerate(SCALES):
                logits = random_logits(seed, positions, vocabulary, scale)
                # Few digits, so that a person can repeat it.
                student, teacher = (part.mul(100).round().div(100) for part in logits)
                probs = [show(normalize(part).exp()) for part in (student, teacher)]
                at = "" if parameter is None else f", parameter {parameter:g}"
                yield f"at S = {probs[0]}, T = {probs[1]}{at}", (parameter, student, teacher)


def _choose_parameters(
    entry: Divergence, arguments: Mapping[str, Number]
) -> Sequence[float | None]:
    """Return the parameter values to check: the given one, or the default and two others."""
    chosen = next((float(value) for value in arguments.values()), None)
    if entry.parameter is None or chosen is not None:
        return [chosen]
    low, high = entry.parameter.low, entry.parameter.high
    span = min(high, low + 1.0) - low
    return [entry.parameter.default, low + 0.2 * span, low + 0.7 * span]


def _list_factor_cases(arguments: Mapping[str, Number]) -> Iterator[Case]:
    for length in LENGTHS:
        for seed in SEEDS:
            yield f"with {length} (seed {seed})", (arguments, seed, length)
