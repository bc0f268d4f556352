"""Experiments over recipes and runs: the doctor, the plan, the comparison."""
