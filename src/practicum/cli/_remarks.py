"""What a command says beside its result."""

import sys


def remark(text: str) -> None:
    """Say something on standard error, for standard output is for the result."""
    print(text, file=sys.stderr)
