"""Tokens sampled from a mixture of teacher and student (MiniLLM, arXiv 2306.08543)."""

PARTS = {"sources": ["token_mix"]}
