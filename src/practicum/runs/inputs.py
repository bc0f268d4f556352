"""Look at the data files and model folders that a recipe names, without loading a model."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from practicum.errors import ModelError, RecipeError
from practicum.models.config import ModelConfig, ScratchConfig
from practicum.models.sources import is_gguf, locate
from practicum.ports import walk
from practicum.ports.inputs import ReadsFiles
from practicum.recipe import Recipe
from practicum.runs.pipeline.stages import PLACEHOLDER, Pipeline


def check_inputs(loaded: Recipe | Pipeline, source: str) -> None:
    """Raise RecipeError with a line for each data file and model folder that cannot be used.

    Data files are read to the end. Of a model, its settings are read and its files counted. Names
    on the hub and at services are not asked for.
    """
    recipes = loaded.build_recipes() if isinstance(loaded, Pipeline) else {"": loaded}
    problems = [
        f"{source}: {line}" for recipe in recipes.values() for line in _list_problems(recipe)
    ]
    if problems:
        # Stages share what they do not set themselves; each line is said once.
        raise RecipeError(list(dict.fromkeys(problems)))


def _list_problems(recipe: Recipe) -> Iterator[str]:
    if isinstance(recipe.task, ReadsFiles):
        for problem in recipe.task.find_problems(Path(recipe.base_dir)):
            yield problem if problem.startswith("task.") else f"task: {problem}"
    for role, config in _list_models(recipe).items():
        if isinstance(config.model, ScratchConfig) or is_gguf(config.model):
            continue
        if config.model.startswith(PLACEHOLDER):
            continue
        try:
            locate(config)
        except ModelError as error:
            yield f"{role}: {error}"


def _list_models(recipe: Recipe) -> Mapping[str, ModelConfig]:
    """Return the settings of the models that are read on this machine, each by its key."""
    models: dict[str, Any] = {}
    if recipe.backend.checkpoints_here:
        models["student"] = recipe.student
    for role, teacher in (("teacher", recipe.teacher), ("reference", recipe.reference)):
        for keys, config in walk(teacher) if teacher is not None else ():
            models[".".join((role, *keys))] = config
    return {key: config for key, config in models.items() if isinstance(config, ModelConfig)}
