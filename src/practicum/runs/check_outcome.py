"""The outcome of a check: status, number with interval, sentence, and fix."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from practicum.statistics import Interval

Status = Literal["fail", "warn", "inconclusive", "pass", "not applicable"]
"""The statuses of a check, most severe first."""


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of one check.

    `fix` holds overrides of the recipe (`key=value`) that belong together. `rollouts_needed` is the
    number of rollouts that would settle an inconclusive check. `details` are further numbers by name.
    """

    status: Status
    sentence: str
    value: Interval | None = None
    unit: str = ""
    fix: tuple[str, ...] = ()
    rollouts_needed: int | None = None
    details: Mapping[str, float | None] = field(default_factory=dict)


def skip_check(reason: str) -> CheckOutcome:
    """Return the outcome of a check that cannot be computed for this recipe."""
    return CheckOutcome("not applicable", reason)
