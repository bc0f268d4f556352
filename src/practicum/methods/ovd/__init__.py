"""Answers in which another writer replaces the rejected steps (OVD, arXiv 2601.21968)."""

PARTS = {"sources": ["replace"]}
