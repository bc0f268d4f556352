"""What a run will cost: one step gone through on paper, without weights, and what follows from it."""

from practicum.diagnosis.plan.memory import Memory
from practicum.diagnosis.plan.planning import Plan, plan, plan_data

__all__ = ["Memory", "Plan", "plan", "plan_data"]
