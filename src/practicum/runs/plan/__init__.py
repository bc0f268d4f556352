"""The plan: the cost of a run, from one dry run of its first step without weights."""

from practicum.runs.plan.memory import Memory, read_memory_limit
from practicum.runs.plan.planning import CostPlan, choose_device, describe_plan, plan

__all__ = ["CostPlan", "Memory", "choose_device", "describe_plan", "plan", "read_memory_limit"]
