"""The command line. It imports torch only when a command needs it."""

from practicum.cli.app import main

__all__ = ["main"]
