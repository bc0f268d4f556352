"""Turns that a model writes anew, and rewards of likelihood (SCoRe, arXiv 2509.14257)."""

PARTS = {"sources": ["correct"], "scorers": ["likelihood"]}
