"""Monitors: detect known failures of distillation in every step, and act on them."""

from practicum.monitors import rules as rules
from practicum.monitors.history import History, StepView
from practicum.monitors.pace import PhaseSpeedMonitor
from practicum.monitors.readings import compute_evaluation_readings, compute_readings
from practicum.monitors.settings import MonitorSettings, MonitorsSection
from practicum.monitors.table import MONITORS, Monitor, RuleResult, Thresholds
from practicum.monitors.watch import Alarm, Watch, find_worst_alarm, read_number

__all__ = [
    "MONITORS",
    "Alarm",
    "History",
    "Monitor",
    "MonitorSettings",
    "MonitorsSection",
    "PhaseSpeedMonitor",
    "RuleResult",
    "StepView",
    "Thresholds",
    "Watch",
    "compute_evaluation_readings",
    "compute_readings",
    "find_worst_alarm",
    "read_number",
]
