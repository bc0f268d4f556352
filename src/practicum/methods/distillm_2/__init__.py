"""Skew KLs with a mixture that follows each answer (DistiLLM-2, arXiv 2503.07067)."""

PARTS = {"signals": ["skewed"]}
