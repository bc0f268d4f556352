"""`practicum serve`: the service's lines on the console, each with the time of day."""

import sys
import time

from practicum.core.notes import show_notes
from practicum.server.serving import Options, serve
from practicum.text import printable


def serve_models(options: Options) -> None:
    """Serve until interrupted."""
    with show_notes(_say):
        serve(options)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {printable(text)}", file=sys.stderr, flush=True)
