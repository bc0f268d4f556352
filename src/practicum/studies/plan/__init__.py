"""What a run will cost: one step gone through on paper, without weights, and what follows from it."""

from practicum.studies.plan.memory import Memory, memory_limit
from practicum.studies.plan.planning import CostPlan, plan, plan_data, run_device

__all__ = ["CostPlan", "Memory", "memory_limit", "plan", "plan_data", "run_device"]
