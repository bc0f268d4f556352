"""Answers whose rejected steps another writer writes again (OVD, arXiv 2601.21968)."""

PARTS = {"sources": ["replace"]}
