"""Arguments that several commands have, and how every command ends."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from practicum.cli._output import print_note
from practicum.cli.completion import complete_recipe
from practicum.core.launched import is_first_message
from practicum.core.notes import show_notes
from practicum.core.options import spell_for_shell
from practicum.errors import PracticumError


class RecipeCommand(TyperCommand):
    """A command that takes overrides: an unknown option that is a key of a recipe is named as one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; fail with the override to write in place of an option."""
        options = {option for param in self.get_params(ctx) for option in param.opts}
        options |= {option for param in self.get_params(ctx) for option in param.secondary_opts}
        for index, word in enumerate(args):
            option, equals, number = word.partition("=")
            if option.startswith("--") and len(option) > 2 and option not in options:
                # Imported here: it takes torch with it.
                from practicum.recipe.keys import find_key

                number = number if equals else next(iter(args[index + 1 :]), "VALUE")
                if key := find_key(option[2:]):
                    ctx.fail(f"no option {option}: a key of a recipe is written {key}={number}")
        return super().parse_args(ctx, args)


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="YAML file of a recipe or pipeline, run folder, or packaged name such as quickstart",
        autocompletion=complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help=(
            "for example train.steps=4, or stages.NAME.train.steps=4; "
            "teacher=off: train only on the reward; teacher=free: without a teacher"
        ),
    ),
]
RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="RUN, RUN@best, RUN@STEP, or a model")
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
        if not error.was_shown and is_first_message(str(error)):
            print(f"error: {lines[0]}", *lines[1:], sep="\n  ", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader of a pipe, such as `head`, has ended. Python flushes stdout at exit and would
        # fail again, so stdout goes to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except OSError as error:
        # A read-only disk or a file of another user: the reason is the system's, not a mistake here.
        if debug:
            raise
        # Imported here: it takes torch with it, and few commands fail.
        from practicum.run_dir.files import build_resource_error

        lack = build_resource_error(str(error.filename or type(error).__name__), error)
        print(f"error: {' '.join(str(lack).split())}", file=sys.stderr)
        raise SystemExit(lack.exit_code) from None
