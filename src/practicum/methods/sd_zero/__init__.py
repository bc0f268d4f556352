"""A text filled with a rollout's fields (SD-Zero, arXiv 2604.12002)."""

PARTS = {"notes": ["filled"]}
