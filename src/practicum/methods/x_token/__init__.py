"""A sparse matrix from the student's vocabulary to the teacher's (X-Token, arXiv 2605.21699)."""

PARTS = {"signals": ["projected"]}
