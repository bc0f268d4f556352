"""Tree search over the steps of an answer, checked by a second model (rStar, arXiv 2408.06195)."""

PARTS = {"sources": ["mutual", "search"], "scorers": ["process"]}
