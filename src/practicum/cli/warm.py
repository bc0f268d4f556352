"""The process that starts the runs of a comparison: see `practicum.runs.warm`."""

import atexit
import sys

from practicum.cli.app import main as run_command
from practicum.runs.warm import note_modules, serve


def main() -> None:
    """Serve requests, and in each child run the command line."""
    words = serve()
    atexit.register(note_modules)
    sys.argv = ["practicum", *words]
    run_command()


if __name__ == "__main__":
    main()
