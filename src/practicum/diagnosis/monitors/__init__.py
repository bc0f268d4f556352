"""Monitors: what goes wrong in distillation, looked for in every step, and what is done about it."""

from practicum.diagnosis.monitors.history import History, Seen
from practicum.diagnosis.monitors.pace import Pace
from practicum.diagnosis.monitors.readings import heldout, read
from practicum.diagnosis.monitors.rules import Finding, Limits
from practicum.diagnosis.monitors.settings import ACTIONS, Action, MonitorSettings, MonitorsSection
from practicum.diagnosis.monitors.table import MONITORS, Monitor
from practicum.diagnosis.monitors.watch import Alarm, Watch, gravest, number_at

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
