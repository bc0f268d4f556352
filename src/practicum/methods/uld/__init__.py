"""The distance of sorted probabilities between two vocabularies (ULD, arXiv 2402.12030)."""

PARTS = {"signals": ["sorted"]}
