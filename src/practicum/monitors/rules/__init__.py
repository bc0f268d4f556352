"""The rules of the monitors: each is one function with its thresholds and advice above it."""

from practicum.monitors.rules import completions as completions
from practicum.monitors.rules import optimization as optimization
from practicum.monitors.rules import success as success
from practicum.monitors.rules import teaching as teaching
from practicum.monitors.table import MONITORS

# Alarms of one step are sorted by the monitors' numbers.
for number in sorted(MONITORS, key=lambda id: int(id[1:])):
    MONITORS[number] = MONITORS.pop(number)
