"""`practicum serve`: the service's lines on the console, each with the time of day."""

import sys
import time

from practicum.core.notes import show_notes
from practicum.server.serving import ServerOptions, serve
from practicum.text import make_printable


def serve_models(options: ServerOptions) -> None:
    """Serve until interrupted."""
    with show_notes(_say):
        serve(options)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {make_printable(text)}", file=sys.stderr, flush=True)
