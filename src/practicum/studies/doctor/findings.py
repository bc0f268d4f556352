"""Judge the measurements of the checks: a status from an interval, fixes that apply, and text for a
page."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import get_args

from practicum.errors import RecipeError
from practicum.recipe import Recipe
from practicum.runs.check_outcome import CheckOutcome, Status
from practicum.runs.overrides import apply_overrides
from practicum.statistics import Interval, group_pairs

STATUS_ORDER = ("fail", "warn", "inconclusive", "pass", "not applicable")
"""The order of the rows in a table of checks: statuses that need a decision come first."""


def grade(interval: Interval, good: float, bad: float) -> Status:
    """Pass if the mean is on the good side of `good`, fail if the whole interval is past `bad`,
    else warn.

    `good <= bad` means that small values are good; otherwise large values are good.
    """
    sign = 1.0 if good <= bad else -1.0
    # Fail only if the whole interval is past the limit, so that noise never fails a check.
    if min(sign * interval.low, sign * interval.high) > sign * bad:
        return "fail"
    return "pass" if sign * interval.mean <= sign * good else "warn"


def find_worst_status(*statuses: Status) -> Status:
    """Return the most severe of several statuses."""
    return min(statuses, key=get_args(Status).index)


def validate_fix(recipe: Recipe, outcome: CheckOutcome) -> CheckOutcome:
    """Drop the fix of an outcome if the recipe refuses it or does not change with it."""
    with suppress(RecipeError):
        if outcome.fix and apply_overrides(recipe, outcome.fix) != recipe:
            return outcome
    return replace(outcome, fix=())


def override_terms(recipe: Recipe, change: str) -> tuple[str, ...]:
    """Return overrides for a change, `weights=prefix(64)`, of every term with a teacher."""
    terms = recipe.objective.losses
    # The keys of a single term need no path, and a person would leave it out.
    if len(terms) == 1:
        return (change,)
    return tuple(
        f"objective.losses.{index}.{change}"
        for index, term in enumerate(terms)
        if term.needs_signal
    )


def describe_skipped(checks: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return one line for each reason why checks do not apply; checks are (id, status, sentence)."""
    reasons = group_pairs(
        (sentence, id) for id, status, sentence in checks if status == "not applicable"
    )
    return [
        f"{len(ids)} check{'s' if len(ids) > 1 else ''} not applicable ({', '.join(ids)}): {reason}"
        for reason, ids in reasons.items()
    ]


def format_number(number: float) -> str:
    """Format a number with three significant digits, and without an exponent from 1000 on."""
    return f"{number:.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def format_interval(interval: Interval | None, unit: str = "") -> str:
    """Format a mean with its interval and unit, `0.12 [0.1, 0.15] nats`; nothing for None."""
    if interval is None:
        return ""
    numbers = format_number(interval.mean)
    if interval.low < interval.high:
        numbers += f" [{format_number(interval.low)}, {format_number(interval.high)}]"
    return f"{numbers} {unit}".rstrip()
