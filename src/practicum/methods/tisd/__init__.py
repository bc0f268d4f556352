"""A teacher's token where a failed answer differs most, and the student's own end (arXiv 2609.30878)."""

PARTS = {"sources": ["branch"]}
