"""What a run was begun with, as recipe.json has it, held against what it is to go on with."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from practicum import run_dir as folders
from practicum.errors import CheckpointError, RecipeError
from practicum.recipe import Recipe, bring_up, parse_recipe, resolved
from practicum.recipe.schedule import depends_on_steps
from practicum.run_dir import Difference, RunDir
from practicum.runs.assembly import RunComponents

log = logging.getLogger(__name__)


def open_run(path: str | Path) -> tuple[RunDir, Recipe]:
    """Return an existing run folder and its recipe; CheckpointError where its recipe.json is damaged."""
    home = RunDir.open(Path(path))
    saved = folders.read_json(home.recipe_json, folders.shapes.SAVED_RUN)
    try:
        return home, parse_recipe(bring_up(saved["recipe"]), str(home.recipe_json))
    except RecipeError as error:
        more = f" and {len(error.problems) - 1} more" if len(error.problems) > 1 else ""
        raise CheckpointError(f"{error.problems[0]}{more}; {folders.RESTORE}") from error


def changes_of(home: RunDir, recipe: Recipe, allow_changed: Sequence[str]) -> list[Difference]:
    """Return what was let change in the recipe; RecipeError, field by field, where anything else changed."""
    saved, now = resolved(open_run(home.path)[1]), resolved(recipe)
    changes, refused = folders.split_changes(saved, now, allow_changed)
    if refused:
        heading = f"{home.path}: the recipe changed since the run began; start a new run, or undo:"
        raise RecipeError([heading, *map(str, refused), *folders.proposal(refused, saved)])
    return changes


def write_recipe(
    home: RunDir, recipe: Recipe, built: RunComponents, changes: Sequence[Difference], first: int
) -> None:
    """Write the resolved recipe, what the run depends on, and what was let change from step `first` on.

    Raises RecipeError where what the run depends on is not what is written there.
    """
    earlier: list[dict[str, Any]] = []
    identity = built.identify()
    if home.recipe_json.is_file():
        saved = folders.read_json(home.recipe_json, folders.shapes.SAVED_RUN)
        _compare(home, saved.get("identity", {}), identity)
        # What is done again from an earlier checkpoint is done under the newer value.
        earlier = [
            {**change, "step": min(change["step"], first)} for change in saved.get("changes", [])
        ]
    for change in changes:
        log.info(f"changed from step {first} on: {change}")
    _tell_longer(recipe, changes)
    if changes:
        home.summary_json.unlink(missing_ok=True)  # a finished run that goes on is not finished
        home.report_html.unlink(missing_ok=True)
    folders.write_json(
        home.recipe_json,
        {
            "recipe": resolved(recipe),
            "identity": identity,
            "prompts": {"used": len(built.parts.prompts), "too_long": len(built.too_long)},
            "changes": earlier + [asdict(change.at(first)) for change in changes],
        },
    )


def _compare(home: RunDir, saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise RecipeError where a model's file, the prompts or the held-out rows are not those that the run began with."""
    if not any("/" in name for name in saved):
        log.warning(
            "this run was begun before the files of models were written down one by one, so models and prompts are "
            "taken to be the same; from now on they are compared"
        )
        return
    changed = folders.changed_parts(saved, now)
    if changed:
        raise RecipeError(
            f"{home.path}: since the run began, {', '.join(changed)}; a run only resumes on the same models, prompts "
            "and held-out rows: put back what was there, or start a new run"
        )


def _tell_longer(recipe: Recipe, changes: Sequence[Difference]) -> None:
    """Note which numbers follow another `train.steps`."""
    follow = [place for place, schedule in recipe.schedules.items() if depends_on_steps(schedule)]
    follow += [] if recipe.optimizer.schedule == "constant" else ["optimizer.schedule"]
    if follow and any(change.field == "train.steps" for change in changes):
        log.info(
            f"{' and '.join(follow)} from now on as if the run had been to have {recipe.train.steps} steps from the start"
        )
