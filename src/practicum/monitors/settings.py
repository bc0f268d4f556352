"""The section `monitors` of a recipe: actions, thresholds, and the changes they may make."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator

from practicum.monitors.table import MONITORS, find_monitor
from practicum.types import FrozenConfig

Action = Literal["off", "log", "warn", "checkpoint", "finish", "pause", "stop"]

ACTIONS: tuple[Action, ...] = get_args(Action)
"""All actions, from the mildest to the most severe."""


class MonitorSettings(FrozenConfig):
    """The settings of one monitor; an absent one is as in the table of monitors."""

    action: Action | None = Field(
        default=None, description="off, log, warn, checkpoint, finish, pause or stop"
    )
    level: float | None = Field(default=None, description="the absolute threshold")
    change: float | None = Field(
        default=None, description="the threshold against the run's own beginning"
    )
    persistence: int | None = Field(
        default=None, ge=1, description="steps in a row before it counts"
    )
    set: dict[str, float | str] = Field(
        default={},
        description="numbers of the recipe to change at an alarm: to a number, "
        "or by a factor such as `x0.5`",
    )

    @field_validator("set")
    @classmethod
    def _check_changes(cls, changes: dict[str, float | str]) -> dict[str, float | str]:
        for path, change in changes.items():
            if parse_factor(change) is None and not isinstance(change, int | float):
                raise ValueError(
                    f"{path}: {change!r} is no change; write a number such as 1e-5, "
                    "or a factor such as x0.5"
                )
        return changes


def parse_factor(change: float | str) -> float | None:
    """Return the factor of a text such as `x0.5`, or None if the change is no factor."""
    if not isinstance(change, str) or not change.startswith("x"):
        return None
    try:
        return float(change[1:])
    except ValueError:
        return None


def replace_pauses(section: Any) -> Any:
    """Return a section in which monitors that would pause a run warn, unless it names their action.

    A paused run raises, so the cells below it in a notebook would have no result.
    """
    if not isinstance(section, Mapping):
        return section
    softened = dict(section)
    for name, monitor in MONITORS.items():
        settings = section.get(name, {})
        if monitor.can_pause and isinstance(settings, Mapping):
            softened[name] = {"action": "warn", **settings}
    return softened


def _read_section(section: Any) -> Any:
    """Expand the short forms: `off` for all monitors, and an action in place of settings."""
    # YAML reads `off` as false.
    if section is False or section == "off":
        section = dict.fromkeys(MONITORS, "off")
    if not isinstance(section, Mapping):
        return section
    for name in section:
        find_monitor(str(name))
    return {name: _read_settings(settings) for name, settings in section.items()}


def _read_settings(settings: Any) -> Any:
    settings = "off" if settings is False else settings
    if isinstance(settings, Mapping) and settings.get("action") is False:
        return {**settings, "action": "off"}
    return {"action": settings} if isinstance(settings, str) else settings


MonitorsSection = Annotated[dict[str, MonitorSettings], BeforeValidator(_read_section)]
