"""`practicum serve`: run the service and print its notes with the time of day, or serve a recipe."""

import sys
import time
from collections.abc import Sequence
from contextlib import closing

from practicum.core.notes import show_notes
from practicum.server.serving import ServerOptions, serve
from practicum.text import make_printable


def serve_models(options: ServerOptions) -> None:
    """Serve models until interrupted."""
    with show_notes(_print_with_time):
        serve(options)


def is_recipe(models: Sequence[str]) -> bool:
    """Return True if the words name a recipe; its student then learns from its users' messages."""
    from practicum.recipe import list_recipe_names

    return models[0].endswith((".yaml", ".yml")) or models[0] in list_recipe_names()


def serve_recipe(options: ServerOptions) -> None:
    """Run a recipe with the task `served` at the address; resumes a run in the folder."""
    # Imported here, because serving models does not need these modules.
    from practicum.recipe import load_recipe
    from practicum.run_dir import RunDir
    from practicum.runs import run
    from practicum.runs.progress import open_console

    source, *overrides = options.models
    changes = [*overrides, f"task.host={options.host}", f"task.port={options.port}"]
    if options.token_file is not None:
        changes.append(f"task.token_file={options.token_file.absolute()}")
    recipe = load_recipe(source, changes)
    has_started = RunDir(options.out / recipe.name).recipe_json.is_file()
    with closing(open_console(as_json=False)) as console:
        run(recipe, out=options.out, resume=has_started, console=console)


def _print_with_time(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {make_printable(text)}", file=sys.stderr, flush=True)
