"""The step and its two loops, evaluation, and the view of single tokens."""
