"""Compare a resumed run with its start: the recipe, the models and the prompts in recipe.json."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from practicum import run_dir as folders
from practicum.core.options import spell_options
from practicum.errors import RecipeError
from practicum.recipe import Recipe, resolve_recipe
from practicum.recipe.schedule import needs_run_length
from practicum.run_dir import Difference, RunDir
from practicum.runs.assembly import RunComponents
from practicum.runs.identity import DECODING, is_dtype
from practicum.runs.opening import open_run

log = logging.getLogger(__name__)

STEPS = "train.steps"
"""The number of steps, which may grow if no other setting depends on it."""


def check_changes(
    run_dir: RunDir, recipe: Recipe, allow_changed: Sequence[str]
) -> list[Difference]:
    """Return the permitted changes of the recipe; raises RecipeError with all further changes.

    More steps are permitted without being named in `allow_changed` if nothing in the recipe depends
    on the length of the run: a longer run would then have begun with the same steps.
    """
    saved_recipe = open_run(run_dir.path)[1]
    saved = resolve_recipe(saved_recipe)
    has_more_steps = recipe.train.steps > saved_recipe.train.steps
    dependent = list_length_dependent(recipe) if has_more_steps else []
    more_steps = [STEPS] if has_more_steps and not dependent else []
    changes, refused = folders.split_changes(
        saved, resolve_recipe(recipe), [*allow_changed, *more_steps]
    )
    if refused:
        heading = f"the recipe changed since the run began; {_advise_new()}, or undo:"
        reasons = []
        if dependent and any(change.field == STEPS for change in refused):
            reasons.append(
                f"{STEPS}: of {recipe.train.steps} steps the first {saved_recipe.train.steps} "
                f"would have been others, because of {' and '.join(dependent)}"
            )
        flags = folders.propose_flags(refused, saved)
        raise RecipeError([f"{run_dir.path}: {heading}", *map(str, refused), *reasons, *flags])
    return changes


def list_length_dependent(recipe: Recipe) -> list[str]:
    """Return the settings that make a step depend on the number of steps of the whole run."""
    dependent = [
        f"{path}: {schedule.model_dump()}"
        for path, schedule in recipe.schedules.items()
        if needs_run_length(schedule)
    ]
    if recipe.optimizer.schedule != "constant":
        dependent.append(f"optimizer.schedule: {recipe.optimizer.schedule}")
    if recipe.rollout.max_staleness:
        # A longer run samples the rollouts of its next steps before the last of these steps ends.
        dependent.append(f"rollout.max_staleness: {recipe.rollout.max_staleness}")
    return dependent


def write_recipe(
    run_dir: RunDir,
    recipe: Recipe,
    components: RunComponents,
    changes: Sequence[Difference],
    first: int,
    allow_changed: Sequence[str] = (),
) -> dict[str, str]:
    """Write the resolved recipe, the digests of its inputs, and the changes from step `first` on.

    Returns the digests. Raises RecipeError if a digest differs from the digest at the start of the run.
    """
    earlier: list[dict[str, Any]] = []
    identity = components.identify()
    if run_dir.recipe_json.is_file():
        saved = folders.read_json(run_dir.recipe_json, folders.shapes.SAVED_RUN)
        before, may_differ = saved.get("identity", {}), "backend.decoding" in allow_changed
        # Changed files also change the decoding, so the files are compared first.
        _compare_files(run_dir, before, identity)
        _compare_dtypes(run_dir, before, identity)
        changes = [*changes, *_compare_decoding(run_dir, before, identity, may_differ)]
        # Steps that are repeated from an earlier checkpoint run with the newer value.
        earlier = [
            {**change, "step": min(change["step"], first)} for change in saved.get("changes", [])
        ]
    for change in changes:
        log.info(f"changed from step {first} on: {change}")
    _log_new_length(recipe, changes)
    if changes:
        # A finished run that continues is no longer finished.
        run_dir.summary_json.unlink(missing_ok=True)
        run_dir.report_html.unlink(missing_ok=True)
    used, too_long = len(components.parts.prompts), len(components.skipped_prompts)
    content = {
        "recipe": resolve_recipe(recipe),
        "identity": identity,
        "prompts": {"used": used, "too_long": too_long},
        "changes": earlier + [asdict(change.to_change(first)) for change in changes],
    }
    folders.write_json(run_dir.recipe_json, content)
    return identity


def _compare_files(run_dir: RunDir, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Raise RecipeError if model files, prompts or held-out rows changed since the run began."""
    saved_files, current_files = (
        {
            name: text
            for name, text in identity.items()
            if not (_is_decoding(name) or is_dtype(name))
        }
        for identity in (saved, current)
    )
    changed = folders.list_changed_parts(saved_files, current_files)
    if changed:
        raise RecipeError(
            f"{run_dir.path}: since the run began, {', '.join(changed)}; a run only resumes on the "
            f"same models, prompts and held-out rows: put back what was there, or {_advise_new()}"
        )


def _advise_new() -> str:
    """Return how to run from the start where a resume is refused."""
    return (
        f"leave {spell_options(resume=True)} out for a new run, with "
        f"{spell_options(overwrite=True)} in place of this one"
    )


def _is_decoding(name: str) -> bool:
    return name.rpartition("/")[2] == DECODING


def _compare_decoding(
    run_dir: RunDir, saved: Mapping[str, str], current: Mapping[str, str], may_differ: bool
) -> list[Difference]:
    """Return the models that decode differently than when the run began.

    Raises RecipeError if they may not.
    """
    differences = [
        Difference(name, before, after, f"{name}: {before} in the run, {after} now")
        for name, before in saved.items()
        if _is_decoding(name) and before != (after := current.get(name, "nothing"))
    ]
    if differences and not may_differ:
        difference = differences[0]
        part = difference.field.rpartition("/")[0]
        raise RecipeError(
            f"{run_dir.path}: the {part} decoded by {difference.before} when the run began, and by "
            f"{difference.after} here, so about one token in 10,000 would differ; resume where "
            f"the run began, or accept the change: {spell_options(allow_changed=['backend.decoding'])}; or "
            f"{_advise_new()}"
        )
    return differences


def _compare_dtypes(run_dir: RunDir, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Raise RecipeError if `dtype: auto` chooses another dtype than when the run began."""
    for name in sorted(filter(is_dtype, {**saved, **current})):
        before, after = (identity.get(name, "float32") for identity in (saved, current))
        if before != after:
            raise RecipeError(
                f"{run_dir.path}: dtype: auto was {before} for the {name.rpartition('/')[0]} when the "
                f"run began and is {after} here; resume on the kind of device that it began on, or "
                f"{_advise_new()}"
            )


def _log_new_length(recipe: Recipe, changes: Sequence[Difference]) -> None:
    """Log the schedules that depend on a changed `train.steps`."""
    names = [setting.partition(":")[0] for setting in list_length_dependent(recipe)]
    if names and any(change.field == STEPS for change in changes):
        log.info(
            f"{' and '.join(names)} from now on as if the run had been to have "
            f"{recipe.train.steps} steps from the start"
        )
