"""Common tokens, and one token for each span that starts at a place (SimCT, arXiv 2605.07711)."""

PARTS = {"signals": ["span_token"]}
