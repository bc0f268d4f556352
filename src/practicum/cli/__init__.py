"""The command line: words to recipe, nothing else. Nothing here imports torch before a command needs it."""

from practicum.cli.app import main

__all__ = ["main"]
