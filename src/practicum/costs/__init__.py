"""The cost of a run in tokens and floating-point operations, counted from requests, not a clock."""

from practicum.costs.footprint import Footprint, GraphPlan, Line
from practicum.costs.ledger import (
    PHASES,
    WIRE_BYTES,
    BudgetTracker,
    Lap,
    Ledger,
    Meter,
    MeteredHead,
    Phase,
    Usage,
    cost_metrics,
    cost_summary,
)
from practicum.costs.shape import ModelDims, ReadTokens, TrainableDims, count_read_tokens

__all__ = [
    "PHASES",
    "WIRE_BYTES",
    "BudgetTracker",
    "Footprint",
    "GraphPlan",
    "Lap",
    "Ledger",
    "Line",
    "Meter",
    "MeteredHead",
    "ModelDims",
    "Phase",
    "ReadTokens",
    "TrainableDims",
    "Usage",
    "cost_metrics",
    "cost_summary",
    "count_read_tokens",
]
