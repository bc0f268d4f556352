"""Look at the data files and model folders that a recipe names, without loading a model."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from practicum.errors import CheckpointError, ModelError, RecipeError
from practicum.models.config import ModelConfig, ScratchConfig
from practicum.models.sources import is_gguf, locate
from practicum.ports import walk
from practicum.recipe import Recipe
from practicum.remote.address import AddressConfig
from practicum.rollouts import check_answers
from practicum.runs.opening import build_task, find_origin
from practicum.runs.row_texts import describe_texts
from practicum.runs.stages import PLACEHOLDER, Pipeline
from practicum.runs.vocabularies import find_contradictions

log = logging.getLogger(__name__)


def check_inputs(loaded: Recipe | Pipeline, source: str) -> None:
    """Refuse missing inputs as `refuse_missing_inputs` does, and note further oddities of the
    inputs.

    Servers that only the run contacts are named. Raises DataError for answers that cannot be
    imitated.
    """
    refuse_missing_inputs(loaded, source)
    recipes = list_recipes(loaded).values()
    notes = [note for recipe in recipes for note in (*_list_places(recipe), *_list_notes(recipe))]
    for note in dict.fromkeys(notes):
        log.info(note)


def refuse_missing_inputs(loaded: Recipe | Pipeline, source: str) -> None:
    """Raise RecipeError with a line for each data file and model folder that cannot be used.

    Data files are read to the end. Of a model, its settings are read, its files counted, and its
    tokens compared with the student's. Names on the hub and at services are not looked up.
    """
    problems = []
    for recipe in list_recipes(loaded).values():
        # Tokens are compared when every folder can be read.
        lines = list(_list_problems(recipe)) or find_contradictions(recipe)
        problems += [f"{source}: {line}" for line in lines]
    if problems:
        # Stages share the sections that they do not set, so each line is reported once.
        raise RecipeError(list(dict.fromkeys(problems)))


def list_recipes(loaded: Recipe | Pipeline) -> dict[str, Recipe]:
    """Return the recipes of all stages by name; of a recipe, itself."""
    if isinstance(loaded, Recipe):
        return {loaded.name: loaded}
    return loaded.build_first_recipes()


def _list_places(recipe: Recipe) -> Iterator[str]:
    """Yield a note for each server that only the run contacts, and each device that is not here."""
    for role, teacher in (("teacher", recipe.teacher), ("reference", recipe.reference)):
        for keys, config in walk(teacher) if teacher is not None else ():
            if isinstance(config, AddressConfig):
                yield (
                    f"{'.'.join((role, *keys))}: {config.url} is contacted when the run starts, not "
                    f"here; check it with practicum probe {config.url}"
                )
    for role, config in _list_models(recipe).items():
        if config.device == "cuda" and not torch.cuda.is_available():
            yield (
                f"{role}.device: cuda, and this machine has no CUDA device; set {role}.device=auto "
                "to run it here"
            )


def _list_notes(recipe: Recipe) -> list[str]:
    """Return notes on the rows, also of the student's tokenizer if both are on this machine.

    Raises DataError if a teacher cannot score a row, or if the recipe imitates answers of rows and
    the chat template cannot write some.
    """
    student = find_origin(recipe.student)
    has_student = isinstance(student.model, str) and Path(student.model).expanduser().is_dir()
    # The rows of a dataset may be on the hub.
    is_dataset = recipe.task.type == "datasets"
    if not recipe.task.reads_files or (is_dataset and not has_student):
        return []
    # The rows have been read once, and their notes were logged then.
    logging.disable(logging.INFO)
    try:
        task = build_task(recipe)
        prompts, heldout = task.train_prompts(), task.heldout_prompts()
    finally:
        logging.disable(logging.NOTSET)
    for _, config in walk(recipe.teacher):
        config.check_prompts([*prompts, *heldout])
    notes = []
    if recipe.evaluation.prompts and not heldout:
        notes.append(f"0 of {len(prompts)} rows held out: nothing will be measured")
    if not has_student:
        return notes
    # Imported here: transformers takes a second, and most recipes name no model folder.
    from practicum.text.tokenizers import load_renderer

    renderer = load_renderer(student)
    check_answers(recipe.rollout.source, prompts, renderer, recipe.longest_answer)
    return [*notes, *describe_texts(prompts, renderer)]


def _list_problems(recipe: Recipe) -> Iterator[str]:
    for problem in recipe.task.find_problems(Path(recipe.base_dir)):
        yield problem if problem.startswith("task.") else f"task: {problem}"
    for role, config in _list_models(recipe).items():
        if isinstance(config.model, str) and config.model.startswith(PLACEHOLDER):
            continue
        try:
            origin = find_origin(config)
            if not isinstance(origin.model, ScratchConfig) and not is_gguf(origin.model):
                locate(origin)
        except (CheckpointError, ModelError) as error:
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
