"""The checks of the doctor that load no model, for `practicum run` before its first step."""

from pathlib import Path

from practicum.models.config import ScratchConfig
from practicum.models.size import count_parameters
from practicum.recipe import Recipe
from practicum.studies.doctor.plan import compare_with_table, judge_memory

FEW_PARAMETERS = 10_000_000
"""Models below this size need no estimate of memory, which takes seconds."""


def find_warnings(recipe: Recipe) -> list[str]:
    """Return a sentence for each check that warns or fails: memory and learning rate."""
    outcomes = {"P19 settings": compare_with_table(recipe)}
    if not _is_small(recipe):
        outcomes = {"P17 memory": judge_memory(recipe), **outcomes}
    return [
        f"{name}: {outcome.sentence}"
        for name, outcome in outcomes.items()
        if outcome is not None and outcome.status in ("warn", "fail")
    ]


def _is_small(recipe: Recipe) -> bool:
    """Return True if all models of a recipe together have few parameters."""
    configs = [recipe.student, *recipe.frozen_models.values()]
    counts = [_count(config.model, Path(recipe.base_dir)) for config in configs]
    return None not in counts and sum(filter(None, counts)) < FEW_PARAMETERS


def _count(model: str | ScratchConfig, folder: Path) -> int | None:
    """Return the parameters of a model, about right for one from scratch; None if they are unknown."""
    if isinstance(model, str):
        return count_parameters(model, folder)[0]
    rows = model.padded_vocabulary or 1000
    return 12 * model.layers * model.hidden_size**2 + rows * model.hidden_size
