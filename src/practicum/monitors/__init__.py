"""Monitors: what goes wrong in distillation, looked for in every step, and what is done about it."""

from practicum.monitors.history import History, Seen
from practicum.monitors.pace import Pace
from practicum.monitors.readings import heldout, read
from practicum.monitors.rules import Finding, Limits
from practicum.monitors.settings import ACTIONS, Action, MonitorSettings, MonitorsSection
from practicum.monitors.table import MONITORS, Monitor
from practicum.monitors.watch import Alarm, Watch, gravest, number_at

__all__ = [
    "ACTIONS",
    "MONITORS",
    "Action",
    "Alarm",
    "Finding",
    "History",
    "Limits",
    "Monitor",
    "MonitorSettings",
    "MonitorsSection",
    "Pace",
    "Seen",
    "Watch",
    "gravest",
    "heldout",
    "number_at",
    "read",
]
