"""A drafter of one layer that learns on its own states (EAGLE-3, arXiv 2503.01840)."""

PARTS = {"drafters": ["eagle3"]}
"""Draft tokens from three of the target's hidden states."""
