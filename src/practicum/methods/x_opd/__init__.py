"""Squares of spoken digits, for X-OPD (arXiv 2603.24596)."""

PARTS = {"tasks": ["spoken"]}
