"""Token credit from a right hint against a wrong one (RLCSD, arXiv 2606.11709)."""

PARTS: dict[str, list[str]] = {}
