"""What a check finds: a status, a number with its interval, one sentence, and what to write in the recipe instead."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from practicum.errors import RecipeError
from practicum.recipe import Recipe, override, parse_recipe, resolve_path, resolved
from practicum.statistics import Interval

Status = Literal["pass", "warn", "fail", "inconclusive", "not applicable"]


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of one check.

    `fix` are overrides of the recipe (`key=value`) that belong together; `needs` is the number of rollouts that would
    settle what these could not; `details` are further numbers by name.
    """

    status: Status
    sentence: str
    value: Interval | None = None
    unit: str = ""
    fix: tuple[str, ...] = ()
    needs: int | None = None
    details: Mapping[str, float | None] = field(default_factory=dict)


def skipped(why: str) -> CheckOutcome:
    """What a check says that cannot be computed here."""
    return CheckOutcome("not applicable", why)


def grade(value: Interval, good: float, bad: float) -> Status:
    """Pass where the mean is on the good side of `good`, fail where the whole interval is past `bad`, else warn.

    The smaller of the two limits says which side is which; so noise alone never fails a check.
    """
    sign = 1.0 if good <= bad else -1.0
    if min(sign * value.low, sign * value.high) > sign * bad:
        return "fail"
    return "pass" if sign * value.mean <= sign * good else "warn"


def find_worst_status(*statuses: Status) -> Status:
    """The gravest of several."""
    order: tuple[Status, ...] = ("fail", "warn", "inconclusive", "pass", "not applicable")
    return min(statuses, key=order.index)


def changed(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """The recipe with overrides applied; RecipeError where it takes none such."""
    data = resolved(recipe)
    for text in changes:
        override(data, resolve_path(text, data))
    return parse_recipe(data, recipe.name)


def accepted(recipe: Recipe, changes: Sequence[str]) -> tuple[str, ...]:
    """The changes where the recipe takes them and they change it, else none: no fix is offered that cannot be written."""
    if not changes:
        return ()
    try:
        return tuple(changes) if changed(recipe, changes) != recipe else ()
    except RecipeError:
        return ()


def override_terms(recipe: Recipe, change: str) -> tuple[str, ...]:
    """A change of every term of the objective that asks the teacher, `weights=prefix(64)`, as overrides."""
    terms = recipe.objective.losses
    if len(terms) == 1:
        return (change,)
    return tuple(
        f"objective.losses.{place}.{change}" for place, term in enumerate(terms) if term.asks
    )


def digits(value: float) -> str:
    """Three significant digits, without an exponent where it can be helped."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def format_interval(value: Interval | None, unit: str = "") -> str:
    """A number with its interval, as a person reads it."""
    if value is None:
        return ""
    numbers = digits(value.mean)
    if value.low < value.high:
        numbers += f" [{digits(value.low)}, {digits(value.high)}]"
    return f"{numbers} {unit}".rstrip()
