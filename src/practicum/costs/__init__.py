"""What a run costs in tokens and floating-point operations: counted from what was asked, without a clock."""

from practicum.costs.footprint import Footprint, GraphPlan, Line
from practicum.costs.ledger import (
    PHASES,
    WIRE_BYTES,
    CountedHead,
    Lap,
    Ledger,
    Meter,
    Phase,
    Spending,
    Work,
    cost_metrics,
    cost_summary,
)
from practicum.costs.shape import Learning, Reading, Shape, read_once

__all__ = [
    "PHASES",
    "WIRE_BYTES",
    "CountedHead",
    "Footprint",
    "GraphPlan",
    "Lap",
    "Learning",
    "Ledger",
    "Line",
    "Meter",
    "Phase",
    "Reading",
    "Shape",
    "Spending",
    "Work",
    "cost_metrics",
    "cost_summary",
    "read_once",
]
