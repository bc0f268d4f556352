"""Measurements, each a module: `python -m benchmarks.demo`. Every one prints one JSON line a result."""
