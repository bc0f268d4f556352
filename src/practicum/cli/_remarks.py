"""Remarks of a command, which go to standard error."""

import sys


def remark(text: str) -> None:
    """Print to standard error, because standard output holds the result."""
    print(text, file=sys.stderr)
