"""Turns that a model corrects, and rewards from a likelihood (SCoRe, arXiv 2509.14257)."""

PARTS = {"sources": ["correct"], "scorers": ["likelihood"]}
