"""Beneath everything: seeds, crash points, notes, cancellation, signals, and names that are files."""
