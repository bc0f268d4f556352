"""`practicum convert`: write a recipe from another tool's configuration, or rows for another tool."""

import sys
from pathlib import Path

import yaml

from practicum.errors import RecipeError
from practicum.recipe.trl import convert_trl
from practicum.recipe.verl import convert_verl
from practicum.runs.step_rows import write_step_rows
from practicum.text.safe import excerpt


def write_rows(run: Path, target: Path) -> None:
    """Write the corrected turns of a run as rows of easydistill."""
    count = write_step_rows(run, target)
    print(f"wrote {count} rows into {target}; next: a recipe with task.path: {target}")


def write_recipe(source: Path, target: Path) -> None:
    """Write a recipe from verl's configuration or TRL's training script, and name on stderr each key that is not taken.

    The same lines are in the recipe as comments. Raises RecipeError if the target exists.
    """
    if target.exists():
        raise RecipeError(f"{target} exists; give another file to --out, or remove it first")
    convert = convert_trl if source.suffix == ".py" else convert_verl
    recipe, notes = convert(source, target)
    lines = [excerpt(note) for note in notes]
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    comments = "".join(f"# {line}\n" for line in lines)
    try:
        target.write_text(f"{text}\n# From {source.name}:\n{comments}", encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{target} cannot be written ({error.strerror})") from error
    for line in lines:
        print(line, file=sys.stderr)
    print(f"wrote {target}; next: practicum check {target}")
