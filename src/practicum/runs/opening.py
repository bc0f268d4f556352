"""Open the parts that a recipe or a run folder names, one by one: a backend, a task, a model, a
run."""

import hashlib
import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from practicum import run_dir as folders
from practicum.core.calls import suggest_name
from practicum.core.plugins import (
    build_part,
    load_plugin,
)
from practicum.core.randomness import seed_of
from practicum.errors import CheckpointError, RecipeError
from practicum.models.config import ModelConfig, ScorerConfig, ScratchConfig
from practicum.models.files import digest_file
from practicum.models.sources import locate_cache
from practicum.ports import (
    Backend,
    BackendContext,
    Model,
    ModelEnding,
    Student,
    Task,
    TaskContext,
)
from practicum.ports.hosting import Hosted
from practicum.recipe import Recipe, parse_recipe
from practicum.run_dir import Checkpoint, RunDir
from practicum.run_dir.checkpoints import step_folders
from practicum.runs.identity import digest_student
from practicum.text import Renderer

log = logging.getLogger(__name__)

PROMPTING = ("system", "stop", "thinking")
"""The settings of a model that an exported folder does not hold."""

AnyModelConfig = TypeVar("AnyModelConfig", bound=ModelConfig)


def open_backend(recipe: Recipe, context: BackendContext) -> Backend:
    """Open the backend that the recipe names."""
    return load_plugin("backends", recipe.backend.type).build(recipe.backend, context)


def is_launched(backend: Any) -> bool:
    """Return True if a launcher starts the processes of a backend before the run begins."""
    return "join" in vars(load_plugin("backends", backend.type))


def join_processes(backend: Any) -> AbstractContextManager[bool]:
    """Synchronize the processes that a launcher started for a run, if its backend uses a launcher.

    The context value is True in the process that runs the recipe. All further processes enter the
    block with False after that run has succeeded; if it fails, they end with its exit code.
    """
    if not is_launched(backend):
        return nullcontext(True)
    return load_plugin("backends", backend.type).join(backend)


def open_local(context: BackendContext) -> Backend:
    """Open the local backend with its default settings."""
    module = load_plugin("backends", "local")
    return module.build(module.Config(), context)


def host_model(config: ModelConfig) -> Hosted:
    """Load a model for a service."""
    return load_plugin("backends", "local").host(config)


def check_model_files(config: ModelConfig) -> None:
    """Raise ModelError if the config or the tokenizer of a model is neither here nor on the hub."""
    load_plugin("backends", "local").check_files(config)


def create_scratch_model(
    folder: Path, config: ScratchConfig, task: Task, template: str | None = None
) -> Path:
    """Return the folder of a from-scratch model for a task; create it on first use."""
    return load_plugin("backends", "local").make_scratch(folder, config, task, template)


def load_ending(config: ModelConfig) -> ModelEnding:
    """Read the last norm and the head of a model into this process."""
    return load_plugin("backends", "local").load_ending(resolve_run(config))


def build_task(
    recipe: Recipe, rejected: Path | None = None, packages: list[str] | None = None
) -> Task:
    """Build the task of a recipe; its relative paths start at the recipe's folder.

    The names of the packages that decide prompts and rewards are added to `packages`.
    """
    packages = [] if packages is None else packages
    context = TaskContext(recipe.seed, Path(recipe.base_dir), rejected, packages)
    return build_part("tasks", Task, recipe.task, context)


def add_tools(renderer: Renderer, task: Task) -> Renderer:
    """Return a renderer that shows the task's tools, if it has any."""
    return renderer if task.toolbox is None else renderer.with_tools(task.toolbox.use)


def load_model(config: ScorerConfig, *, pictures: bool = False) -> Model:
    """Load a model into this process, outside of a run; `pictures` if prompts have some."""

    def refuse_task() -> Task:
        raise AssertionError("a model that is named needs no task")

    context = BackendContext(0, Path(), refuse_task, lambda: open_local(context), pictures=pictures)
    return open_local(context).load_scorer(resolve_run(config), "model")


def load_student(
    recipe: Recipe, models: Path, *, pictures: bool = False
) -> tuple[Backend, Student]:
    """Load only the student of a recipe, into one process; `models` has from-scratch models.

    `pictures` is True if prompts have some.
    """
    recipe = recipe.model_copy(update={"backend": recipe.backend.build_single()})
    seed = seed_of(recipe.seed, "student")
    context = BackendContext(
        seed,
        models,
        lambda: build_task(recipe),
        lambda: open_local(context),
        pictures=pictures,
    )
    backend = open_backend(recipe, context)
    return backend, backend.load_student(resolve_model(recipe.student, recipe))


def open_run(path: str | Path) -> tuple[RunDir, Recipe]:
    """Return an existing run folder and its recipe; raises CheckpointError if it is damaged."""
    run_dir = RunDir.open(Path(path))
    saved = folders.read_json(run_dir.recipe_json, folders.shapes.SAVED_RUN)
    try:
        return run_dir, parse_recipe(saved["recipe"], str(run_dir.recipe_json))
    except RecipeError as error:
        more = f" and {len(error.problems) - 1} more" if len(error.problems) > 1 else ""
        raise CheckpointError(f"{error.problems[0]}{more}; {folders.RESTORE}") from error


def require_checkpoint(run_dir: RunDir) -> Checkpoint:
    """Return the newest intact checkpoint, or the checkpoint of `RUN@best` or `RUN@STEP`.

    Raises CheckpointError if it does not exist.
    """
    number = _find_best(run_dir) if run_dir.checkpoint == "best" else run_dir.checkpoint
    step = None if number is None else int(number)
    checkpoint, _ = folders.find_checkpoint(run_dir, step)
    if checkpoint is None and step is not None:
        steps = sorted({saved for saved, _ in step_folders(run_dir.checkpoints)})
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none"
        raise CheckpointError(f"{run_dir.path}: no checkpoint of step {step}; {there}")
    if checkpoint is None:
        raise CheckpointError(
            f"{run_dir.path}: no checkpoint yet; resume the run, or give a model folder instead"
        )
    return checkpoint


def _find_best(run_dir: RunDir) -> int:
    """Return the best step of a run; raises CheckpointError if it has none."""
    path = run_dir.path
    metric = open_run(path)[1].train.metric_for_best_model
    if metric is None:
        raise CheckpointError(
            f"{path}@best: the recipe sets no train.metric_for_best_model, so there is no best step; "
            f"name a step as {path}@STEP, or use {path} for the newest"
        )
    tracker = folders.recall_best(run_dir, metric)
    # The last step of a run that ended early is evaluated too, and only the summary has its result.
    if run_dir.summary_json.is_file():
        summary = folders.read_json(run_dir.summary_json, folders.shapes.SUMMARY)
        tracker.merge(summary["best"])
    if tracker.step is None:
        raise CheckpointError(
            f"{path}@best: no step was evaluated and saved yet with a finite {metric} and a sound "
            f"student; use {path} for the newest checkpoint"
        )
    return tracker.step


def open_student(path: str | Path) -> tuple[Backend, Student]:
    """Load a run's student with the weights of its newest or named checkpoint, and its backend."""
    return load_trained_student(*open_run(path))


def load_trained_student(
    run_dir: RunDir, recipe: Recipe, *, pictures: bool = False
) -> tuple[Backend, Student]:
    """Load the same of an open run, with the settings of a recipe that may differ from the run's."""
    checkpoint = require_checkpoint(run_dir)
    if not recipe.backend.checkpoints_here:
        where = ", ".join(checkpoint.read_tensors("student"))
        raise CheckpointError(
            f"{run_dir.path}: the student is at a service, {where}, and its weights are not here; "
            "ask the service"
        )
    backend, student = load_student(recipe, run_dir.models, pictures=pictures)
    if is_run(recipe.student.model):
        _check_origin(run_dir, recipe, student)
    backend.load(student, checkpoint.path, moments=False)
    return backend, student


def refuse_missing_run(target: str) -> None:
    """Raise RecipeError if a text means a run next to others, and there is no such folder.

    As a name on the hub it would go out to the network.
    """
    path = RunDir(Path(target)).path
    runs = sorted(str(file.parent) for file in Path(target).parent.glob("*/recipe.json"))
    if runs and len(Path(target).parts) > 1 and not path.exists():
        raise RecipeError(f"there is no folder {path}; {suggest_name(target, runs)}")


def is_run(model: object) -> bool:
    """Return True if a recipe's model is the folder of a run or of a pipeline."""
    if not isinstance(model, str):
        return False
    folder = RunDir(Path(model).expanduser())
    is_single = folder.recipe_json.is_file() and folder.checkpoints.is_dir()
    return is_single or folder.pipeline_json.is_file()


def find_origin(config: ModelConfig) -> ModelConfig:
    """Return the settings with the model that a run began with in place of its folder.

    Nothing is loaded. Raises CheckpointError if a run is damaged or has no checkpoint.
    """
    while is_run(config.model):
        run_dir, recipe = open_run(resolve_stage(str(Path(str(config.model)).expanduser())))
        require_checkpoint(run_dir)
        config = config.model_copy(update={"model": recipe.student.model})
    return config


def resolve_stage(target: str) -> str:
    """Return the last started stage of a pipeline's folder; other targets are unchanged."""
    # Names of stage folders begin with their numbers, so the last name is the newest stage.
    run_dir = RunDir(Path(target))
    stages = sorted(path.parent for path in run_dir.stages.glob("*/recipe.json"))
    if not stages:
        return target
    return str(stages[-1]) + (f"@{run_dir.checkpoint}" if run_dir.checkpoint else "")


def resolve_model(config: AnyModelConfig, recipe: Recipe) -> AnyModelConfig:
    """Return the settings of a model of a run: see `resolve_run`, and the run's longest text."""
    resolved = resolve_run(config)
    longest = resolved.longest_text or recipe.longest_text
    return resolved.model_copy(update={"longest_text": longest})


def resolve_run(config: AnyModelConfig) -> AnyModelConfig:
    """Return a model's settings with a model folder in place of the folder of a run."""
    if not is_run(config.model):
        if isinstance(config.model, str):
            refuse_missing_run(config.model)
        return config
    path = resolve_stage(str(Path(str(config.model)).expanduser()))
    return config.model_copy(update={"model": str(_export_newest(Path(path), config))})


def _export_newest(path: Path, config: ModelConfig) -> Path:
    """Return the cached model folder of a run's newest checkpoint; the first call exports it."""
    run_dir, recipe = open_run(path)
    checkpoint = require_checkpoint(run_dir)
    # The checkpoint holds the trained weights, and recipe.json the digests of all others.
    sums = digest_file(checkpoint.path / folders.MANIFEST) + digest_file(run_dir.recipe_json)
    digest = hashlib.sha256(sums.encode()).hexdigest()[:12]
    folder = locate_cache() / "runs" / f"{run_dir.path.name}-step-{checkpoint.step}-{digest}"
    if not (folder / "config.json").is_file():
        log.info(f"{path}: writing step {checkpoint.step} as a model folder, once: {folder}")
        backend, student = open_student(path)
        try:
            backend.export(student, folder)
        except OSError:
            # Two processes may export at once: the slower one's rename fails, its copy is equal.
            if not (folder / "config.json").is_file():
                raise
    settings = recipe.student.model_dump(include=set(PROMPTING), exclude_defaults=True)
    unset = ", ".join(sorted(settings.keys() - config.model_fields_set))
    if unset:
        log.info(
            f"{path}: its student was trained with {unset}, which the weights do not hold; set "
            "the same in this recipe to prompt it in the same way"
        )
    return folder


def _check_origin(run_dir: RunDir, recipe: Recipe, student: Student) -> None:
    """Raise CheckpointError if the run that a student started from has advanced since then."""
    saved = folders.read_json(run_dir.recipe_json, folders.shapes.SAVED_RUN).get("identity", {})
    current = digest_student(student, is_local=True)
    if any(saved.get(name) != digest for name, digest in current.items()):
        raise CheckpointError(
            f"{run_dir.path}: its student started from {recipe.student.model}, and "
            "the weights there have changed; the checkpoint does not belong to them"
        )
