"""Two weighted tokens at each state of a given text (HPD, arXiv 2604.20244)."""

PARTS = {"signals": ["hybrid"]}
