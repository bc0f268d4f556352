"""Hold one entry to the laws of its kind, on inputs that grow, so that the first failure is small."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from practicum.core.foreign import describe_error
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

FACTOR_LAWS: Mapping[str, Sequence[Callable[..., None]]] = {
    "weight": WEIGHT_LAWS,
    "sample weight": SAMPLE_WEIGHT_LAWS,
    "correction": CORRECTION_LAWS,
    "advantage": ADVANTAGE_LAWS,
    "reward": REWARD_LAWS,
}

SHAPES = ((1, 2), (1, 3), (2, 4), (4, 6), (4, 9))
"""Positions and vocabulary of the inputs of divergences, the smallest first."""
SCALES = (0.5, 1.5, 3.0)
LENGTHS = (1, 2, 3, 5, 12)
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A law with its statement, and the smallest input that breaks it; None if it holds."""

    law: str
    statement: str
    counterexample: str | None

    @property
    def holds(self) -> bool:
        """Return True if no input broke the law."""
        return self.counterexample is None


def check_laws(kind: str, entry: AnyEntry, arguments: Mapping[str, Number]) -> list[Verdict]:
    """Hold an entry of a kind, such as `weight`, to its laws; missing arguments have their default.

    Without an argument, a divergence with a parameter is also checked at two other values.
    """
    if isinstance(entry, Divergence):
        return [_judge(law, _list_divergence_cases(entry, arguments)) for law in DIVERGENCE_LAWS]
    chosen = arguments if kind == "advantage" else {**entry.defaults, **arguments}
    laws = FACTOR_LAWS[kind]
    return [_judge(law, _list_factor_cases(entry, chosen)) for law in laws]


def _judge(law: Callable[..., None], cases: Iterator[tuple[str, tuple[Any, ...]]]) -> Verdict:
    """Return whether a law holds on all cases, and the first case that breaks it."""
    statement = (inspect.getdoc(law) or "").partition("\n\n")[0]
    for words, inputs in cases:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                law(*inputs)
        except LawBroken as broken:
            return Verdict(law.__name__, statement, f"{words}: {broken}")
        except Exception as error:
            # An entry of the user's may raise anything.
            return Verdict(law.__name__, statement, f"{words}: it raises {describe_error(error)}")
    return Verdict(law.__name__, statement, None)


def _list_divergence_cases(
    entry: Divergence, arguments: Mapping[str, Number]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for positions, vocabulary in SHAPES:
        for parameter in _choose_parameters(entry, arguments):
            for scale in SCALES:
                for seed in SEEDS:
                    logits = random_logits(seed, positions, vocabulary, scale)
                    # Few digits, so that a person can repeat it.
                    student, teacher = (part.mul(10).round().div(10) for part in logits)
                    words = f"at S = {show(normalize(student).exp())}, T = {show(normalize(teacher).exp())}"
                    if parameter is not None:
                        words += f", parameter {parameter:g}"
                    yield words, (entry, parameter, student, teacher)


def _choose_parameters(
    entry: Divergence, arguments: Mapping[str, Number]
) -> Sequence[float | None]:
    """Return the parameter values to check: the given one, or the default and two others."""
    given = next((float(value) for value in arguments.values()), None)
    if entry.parameter is None or given is not None:
        return [given]
    low, high = entry.parameter.low, entry.parameter.high
    span = min(high, low + 1.0) - low
    return [entry.parameter.default, low + 0.2 * span, low + 0.7 * span]


def _list_factor_cases(
    entry: Any, arguments: Mapping[str, Number]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for length in LENGTHS:
        for seed in SEEDS:
            yield f"with {length} (seed {seed})", (entry, arguments, seed, length)
