"""Measure the library by named benchmarks, see `python -m benchmarks --help`. Each prints a table and one JSON line per result."""
