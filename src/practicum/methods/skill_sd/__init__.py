"""A memory of texts from earlier steps (Skill-SD, arXiv 2604.10674)."""

PARTS = {"notes": ["memory"]}
