"""Actions as tokens: a distance of action values, and an environment with frames (RPD, arXiv 2503.05833)."""

PARTS = {"signals": ["action"]}
