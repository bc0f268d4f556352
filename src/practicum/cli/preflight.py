"""The seconds before a new run: what a recipe's files and settings show without a model."""

import shlex
from collections.abc import Sequence

from practicum.recipe import Recipe
from practicum.runs.console import Console
from practicum.runs.inputs import refuse_missing_inputs
from practicum.runs.pipeline import Pipeline, load_pipeline_or_recipe
from practicum.runs.progress import show_progress
from practicum.studies.doctor.preflight import find_warnings
from practicum.text import make_printable


def look_before_run(source: str, overrides: Sequence[str], console: Console) -> Recipe | Pipeline:
    """Return the recipe; print a line for each doubtful setting, and nothing if there is none.

    Raises RecipeError for inputs that cannot be used.
    """
    with show_progress(console):
        loaded = load_pipeline_or_recipe(source, overrides)
    refuse_missing_inputs(loaded, source)
    if isinstance(loaded, Pipeline):
        return loaded
    doctor = f"practicum doctor {shlex.join([source, *overrides])}"
    for warning in find_warnings(loaded):
        console.event(make_printable(f"{warning}; {doctor} says more before the first step"))
    return loaded
