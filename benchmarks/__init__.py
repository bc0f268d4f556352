"""Measure the library by named benchmarks: `python -m benchmarks --help` lists them. Each prints a table and one JSON line per result."""
