"""Common tokens, and one token for the span that starts at a position (SimCT, arXiv 2605.07711)."""

PARTS = {"signals": ["span_token"]}
