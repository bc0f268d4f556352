"""Measurements by name: `python -m benchmarks --help` lists them. Every one prints a table and one JSON line a result."""
