"""The monitors: one function each, with its thresholds and advice.

A rule returns its reading, the value that it is compared with, and a score: 1 and above breaks the
rule, below 0.8 the reading has recovered. None means that the step cannot be judged. `practicum ls
monitors` and docs/monitors.md show the docstrings, so they describe the reading of a rule.

Alarms must come out the same however often a run is resumed. M25 (the pace of each phase) reads the
clock, so it is in a separate module, `pace.py`. M28 (budgets) is `train.budget`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from practicum.foreign import suggest_name
from practicum.functional.table import Table
from practicum.monitors.history import StepView
from practicum.monitors.patches import Patch

Grade = Literal["published", "proposed"]

TINY = 1e-12

CERTAIN = 0.3
"""Nats per token: the entropy of a teacher below which a student that is surer has lost nothing."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The thresholds of a rule: an absolute level, and a change against the run's own beginning."""

    level: float | None = None
    change: float | None = None


@dataclass(frozen=True, slots=True)
class RuleResult:
    """The value of a reading, its baseline, and a score that breaks the rule from 1 on.

    `patch` is a remedy for the cause that the rule sees; it precedes the monitor's patches.
    """

    reading: str
    value: float
    score: float
    baseline: float | None = None
    patch: Patch | None = None


Rule = Callable[[StepView, Thresholds], RuleResult | None]


@dataclass(frozen=True, slots=True)
class Monitor:
    """One rule about the steps of a run.

    `level` and `change` are its thresholds, and `rule_text` is the rule with both filled in.
    After `persistence` steps in a row that break the rule, `action` follows; `escalation` is a score
    and the action that follows from that score on. The `grade` of the thresholds is `published` if
    `source` states the same values.
    """

    id: str
    judge: Rule
    name: str
    rule_text: str
    patches: tuple[Patch, ...]
    source: str = "common practice"
    grade: Grade = "proposed"
    action: str = "warn"
    level: float | None = None
    change: float | None = None
    persistence: int = 2
    escalation: tuple[float, str] | None = None

    @property
    def can_end_run(self) -> bool:
        """True if one of the monitor's actions ends a run."""
        return not {self.action, *(self.escalation or ())}.isdisjoint({"finish", "pause", "stop"})

    @property
    def can_pause(self) -> bool:
        """True if one of the monitor's actions pauses a run."""
        return "pause" in (self.action, *(self.escalation or ()))


MONITORS = Table(Monitor, "monitors")
"""All monitors by id. A monitor of another package is active if the recipe names it."""


def find_monitor(name: str) -> Monitor:
    """Return a monitor by id, by the word that a package publishes, or by its name in full.

    Raise ValueError with the closest known name.
    """
    try:
        return MONITORS[name]
    except KeyError:
        raise ValueError(
            f"no monitor {name!r}; {suggest_name(name, MONITORS.list_names())}"
        ) from None


def find_worst(results: list[RuleResult]) -> RuleResult | None:
    """Return the result with the largest score; None without results."""
    return max(results, key=lambda result: result.score, default=None)


def is_sharper_than_teacher(view: StepView) -> bool | None:
    """Return True if student entropy is under half the teacher's, or None if one is not known.

    False if the teacher is nearly certain, too: its entropy is under `CERTAIN`.
    """
    student, teacher = view.smooth("student_entropy"), view.smooth("teacher_entropy")
    if student is None or teacher is None:
        return None
    return student < 0.5 * teacher and teacher >= CERTAIN


def require_limit(limit: float | None) -> float:
    """Return a threshold that the monitor has."""
    assert limit is not None, "the table gives this monitor the threshold that its rule reads"
    return limit
