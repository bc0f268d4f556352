"""Arguments that several commands have, and how every command ends."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from practicum.cli._output import print_note
from practicum.cli.completion import complete_recipe
from practicum.core.launched import is_first_to_say
from practicum.core.notes import show_notes
from practicum.core.options import spell_for_shell
from practicum.errors import PracticumError

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="YAML file of a recipe or pipeline, or a packaged name such as quickstart",
        autocompletion=complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help=(
            "for example train.steps=4, or stages.NAME.train.steps=4; "
            "teacher=off: train on the reward alone; teacher=free: without a teacher"
        ),
    ),
]
RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="run folder, model folder or model name")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object per line")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]


@contextmanager
def handle_errors(debug: bool) -> Iterator[None]:
    """Show the notes of the block on stderr, and end the process on an error for the user."""
    try:
        # Standard output holds the results of a command; `run` shows its notes there itself.
        with spell_for_shell(), show_notes(print_note):
            yield
    except PracticumError as error:
        if debug:
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        if is_first_to_say(str(error)):
            print(f"error: {lines[0]}", *lines[1:], sep="\n  ", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has ended. Python flushes stdout at exit and would
        # fail again, so stdout goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
