"""Oversampled answers, selected by success and format (rStar2-Agent, arXiv 2508.20722)."""

PARTS = {"sources": ["resample"], "tasks": ["python_expressions"]}
