"""A drafter learns at the states that its own rejected drafts lead to (Draft-OPD, arXiv 2605.29343)."""

PARTS = {"sources": ["drafts"]}
"""Add the rejected drafts to the target's text."""
