"""The rollouts of a run as rows for other trainers, in the form that the run's source gives them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from practicum.errors import DataError, RecipeError
from practicum.rollouts import RolloutRow, SourceConfig
from practicum.run_dir import read_rows, shapes
from practicum.runs.opening import build_task, open_run
from practicum.types import Prompt


def write_step_rows(run: Path, target: Path) -> int:
    """Write a run's rows as a JSON list and return their number.

    Raises RecipeError if the run's source has no such form, or if the target exists.
    """
    run_dir, recipe = open_run(run)
    source = recipe.rollout.source
    if not source.converts_rows:
        raise RecipeError(
            f"{run}: rollout.source is {source.name!r}, and rows of corrected turns come from a run "
            "with rollout.source: correct"
        )
    if target.exists():
        raise RecipeError(f"{target} exists; give another file to --out, or remove it first")
    prompts = {prompt.id: prompt for prompt in build_task(recipe).train_prompts()}
    rows = list(_convert_rows(run_dir.rollouts_jsonl, prompts, source))
    try:
        target.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{target} cannot be written ({error.strerror})") from error
    return len(rows)


def _convert_rows(
    path: Path, prompts: Mapping[str, Prompt], source: SourceConfig
) -> Iterator[Mapping[str, Any]]:
    """Yield the row of each rollout that has one."""
    for number, saved in enumerate(read_rows(path, shapes.ROLLOUT), start=1):
        fields = {name: saved[name] for name in RolloutRow.model_fields if name in saved}
        row = RolloutRow.model_validate(fields)
        if row.prompt not in prompts:
            raise DataError(
                f"{path}: row {number}: no prompt of the task is called {row.prompt[:40]!a}; "
                "the task's rows have changed since"
            )
        converted = source.convert_row(prompts[row.prompt], row)
        if converted is not None:
            yield converted
