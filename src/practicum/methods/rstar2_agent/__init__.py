"""More answers than are trained on, chosen by their success and form (rStar2-Agent, arXiv 2508.20722)."""

PARTS = {"sources": ["resample"]}
