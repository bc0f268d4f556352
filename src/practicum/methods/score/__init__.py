"""Reward of tokens by a teacher"s likelihood (SCoRe, arXiv 2509.14257)."""

PARTS = {"scorers": ["likelihood"]}
