"""Answers that state the measured success rate as their confidence (CaOPD, arXiv 2604.16830)."""

PARTS = {"sources": ["restate"], "notes": ["rate"]}
