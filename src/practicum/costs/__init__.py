"""The cost of a run in tokens and floating-point operations, counted from requests, not a clock."""

from practicum.costs.amounts import format_bytes, format_count, format_flops
from practicum.costs.footprint import Footprint, GraphPlan, Line
from practicum.costs.ledger import (
    PHASES,
    WIRE_BYTES,
    BudgetTracker,
    Ledger,
    Meter,
    MeteredHead,
    Phase,
    Usage,
    UsageByPhase,
    UsageRow,
    build_cost_metrics,
    read_usage,
    summarize_costs,
    write_usage,
)
from practicum.costs.shape import (
    ModelDims,
    ReadTokens,
    TrainableDims,
    count_continued_tokens,
    count_read_tokens,
)

__all__ = [
    "PHASES",
    "WIRE_BYTES",
    "BudgetTracker",
    "Footprint",
    "GraphPlan",
    "Ledger",
    "Line",
    "Meter",
    "MeteredHead",
    "ModelDims",
    "Phase",
    "ReadTokens",
    "TrainableDims",
    "Usage",
    "UsageByPhase",
    "UsageRow",
    "build_cost_metrics",
    "count_continued_tokens",
    "count_read_tokens",
    "format_bytes",
    "format_count",
    "format_flops",
    "read_usage",
    "summarize_costs",
    "write_usage",
]
