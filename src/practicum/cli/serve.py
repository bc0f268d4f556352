"""`practicum serve`: run the service and print its notes with the time of day."""

import sys
import time

from practicum.core.notes import show_notes
from practicum.server.serving import ServerOptions, serve
from practicum.text import make_printable


def serve_models(options: ServerOptions) -> None:
    """Serve models until interrupted."""
    with show_notes(_print_with_time):
        serve(options)


def _print_with_time(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {make_printable(text)}", file=sys.stderr, flush=True)
