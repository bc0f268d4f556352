"""Start or resume a run: evaluate, train, checkpoint, evaluate again, and write everything down.

Nothing in `metrics.jsonl`, `rollouts.jsonl` and `summary.json` depends on the clock, so a run that
was killed and resumed writes the same bytes as one that was not. Seconds go to `timings.jsonl`.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from practicum.core.options import spell_options
from practicum.core.stopping import Stop, catch_stop_signals
from practicum.errors import PracticumError, RecipeError, ResourceError, TooFewGpus, WorkerLost
from practicum.models.devices import explain_missing_operations
from practicum.monitors.settings import replace_pauses
from practicum.objective import Objective
from practicum.ports import Task
from practicum.ports.given.teacher import ScoresRollouts
from practicum.ports.scoring import Scorer
from practicum.prompts import Prompt
from practicum.recipe import Recipe, load_recipe
from practicum.recipe.typed import (
    BackendSection,
    EvaluationSection,
    ObjectiveSection,
    OptimizerSection,
    PricesSection,
    RolloutSection,
    StudentSection,
    TaskSection,
    TeacherSection,
    TrackingSection,
    TrainSection,
)
from practicum.run_dir import RunDir, write_json
from practicum.runs.console import Console
from practicum.runs.naming import choose_name, explain_name
from practicum.runs.opening import join_processes
from practicum.runs.overrides import apply_overrides
from practicum.runs.preflight import check_before_run
from practicum.runs.progress import show_progress
from practicum.runs.python_objects import build_recipe
from practicum.runs.result import RunResult
from practicum.runs.session import Session
from practicum.runs.tracked import RunTracker

log = logging.getLogger(__name__)

ERROR_JSON = "error.json"
"""The error that ended a run, until it is resumed."""

Section = Mapping[str, Any]
"""A section of a recipe as data, for example `{"type": "self", "weights": "frozen"}`."""

Rows = Iterable[Mapping[str, Any]]
"""The rows of a task, for example `[{"prompt": "2 + 2", "answer": "4"}]`."""

ModelSection = Section | str | Path | tuple[Any, Any]
"""A section that names a model: as data, as the model's path or name, or `(model, tokenizer)`."""


def run(  # noqa: PLR0913  (the options of a run, one by one)
    recipe: Recipe | str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path = "runs",
    resume: bool = False,
    allow_changed: Sequence[str] = (),
    overwrite: bool = False,
    progress: bool = True,
    console: Console | None = None,
    stop: Stop | None = None,
) -> RunResult:
    """Run a recipe in a folder of `out` named after it, or resume from its newest checkpoint.

    If the run of that name is finished, the new run is NAME-2, NAME-3 and so on. `allow_changed`
    names recipe fields that may differ from the start of the run, such as
    `optimizer.learning_rate`. `overwrite` replaces an earlier run in the folder. The run calls
    `stop` after every step; without it, the run handles SIGINT and SIGTERM itself. Progress is
    shown as `show_progress` explains; with `progress=False`, messages are only logged under
    `practicum`. Raises a PracticumError with its documented exit code; the results until then are
    in the run folder.
    """
    check_resumes(resume, allow_changed, overwrite=overwrite)
    with show_progress(console, progress=progress) as screen:
        if not isinstance(recipe, Recipe):
            recipe = load_recipe(recipe, overrides)
        name = recipe.name
        if not (resume or overwrite):
            recipe = recipe.model_copy(update={"name": choose_name(Path(out), name)})
        with (
            explain_name(name, recipe.name),
            record_loss(Path(out) / recipe.name),
            join_processes(recipe.backend) as leads,
        ):
            if not leads:
                return RunResult.read(Path(out) / recipe.name)
            return run_in_folder(
                recipe,
                Path(out),
                screen,
                resume=resume,
                allow_changed=allow_changed,
                overwrite=overwrite,
                stop=stop,
            )


def run_in_folder(
    recipe: Recipe,
    out: Path,
    console: Console,
    *,
    resume: bool = False,
    allow_changed: Sequence[str] = (),
    overwrite: bool = False,
    stop: Stop | None = None,
) -> RunResult:
    """Start or resume a run as `run` does, on a console that already shows notes."""
    name = recipe.name
    run_dir = RunDir.open(out / name) if resume else RunDir.create(out, name, overwrite=overwrite)
    signals = nullcontext(stop) if stop else catch_stop_signals()
    # The lock comes before the tracker: a second process must not send metrics of this run.
    with (
        run_dir.lock(),
        signals as stop_check,
        RunTracker.open(recipe, run_dir) as tracker,
    ):
        losses = 0
        while True:
            try:
                with ExitStack() as exit_stack:
                    session = Session(run_dir, recipe, console, stop_check, tracker, exit_stack)
                    with _write_error(run_dir), explain_missing_operations():
                        return session.execute(allow_changed, resume=resume)
            except WorkerLost as loss:
                losses += 1
                # Without recipe.json no step had begun, so there is no run to resume.
                if losses > loss.restarts or not run_dir.recipe_json.is_file():
                    raise
                log.warning(f"{loss}; going on by itself, {losses} of {loss.restarts} times")
            except TooFewGpus as lack:
                # A new run is not made smaller than its recipe.
                if not losses or not lack.overrides:
                    raise
                log.warning(f"{lack.problem}; going on with {' '.join(lack.overrides)}")
                recipe = apply_overrides(recipe, lack.overrides)
            allow_changed, resume = (), True


@contextmanager
def _write_error(run_dir: RunDir) -> Iterator[None]:
    """Write the error that ends a run into its folder, before processes are ended that may be stuck."""
    path = run_dir.path / ERROR_JSON
    with suppress(OSError):
        path.unlink(missing_ok=True)
    try:
        yield
    except PracticumError as error:
        record_error(run_dir.path, error)
        raise


@contextmanager
def record_loss(folder: Path) -> Iterator[None]:
    """Record that the processes of a run, or of a pipeline's newest stage, were lost.

    The lost process may be the leader of the run, so every process records it.
    """
    try:
        yield
    except WorkerLost as error:
        newest = [folder, *sorted((folder / "stages").glob("*"))][-1]
        record_error(newest, error)
        raise


def record_error(folder: Path, error: PracticumError) -> None:
    """Write the error that ended a run into its folder, if the run had begun."""
    if (folder / "recipe.json").is_file():
        # An error that cannot be written is still shown.
        with suppress(ResourceError, OSError):
            write_json(folder / ERROR_JSON, {"exit_code": error.exit_code, "error": str(error)})


def check_resumes(resume: bool, allow_changed: Sequence[str], *, overwrite: bool = False) -> None:
    """Raise RecipeError if options contradict each other.

    Changes are allowed in a resumed run only, and a resumed run is not overwritten.
    """
    if resume and overwrite:
        both = spell_options(resume=True, overwrite=True)
        raise RecipeError(f"{both}: a run is either continued or replaced; leave one of them out")
    if allow_changed and not resume:
        option = spell_options(allow_changed=[allow_changed[0]])
        advice = f"add {spell_options(resume=True)}"
        raise RecipeError(f"{option}: a new run has no earlier settings to change; {advice}")


def distill(  # noqa: PLR0913  (the sections of a recipe, by name)
    *,
    student: StudentSection | ModelSection,
    teacher: TeacherSection | ModelSection | ScoresRollouts | None = None,
    task: TaskSection | Section | Rows | tuple[Rows, Callable[..., Any]] | Task,
    objective: ObjectiveSection | Section | Objective | None = None,
    rollout: RolloutSection | Section | None = None,
    optimizer: OptimizerSection | Section | None = None,
    train: TrainSection | Section,
    evaluation: EvaluationSection | Section | None = None,
    monitors: Section | None = None,
    backend: BackendSection | Section | None = None,
    reference: TeacherSection | ModelSection | ScoresRollouts | None = None,
    scorers: Mapping[str, Section | Scorer | Callable[[Prompt, str], float]] | None = None,
    notes: Mapping[str, Section] | None = None,
    tracking: TrackingSection | Section | str | None = None,
    prices: PricesSection | Section | None = None,
    prompt_tokens: int | None = None,
    about: str | None = None,
    name: str = "distill",
    seed: int = 0,
    out: str | Path = "runs",
    resume: bool = False,
    allow_changed: Sequence[str] = (),
    overwrite: bool = False,
    progress: bool = True,
    console: Console | None = None,
) -> RunResult:
    """Run a recipe with sections as in YAML; missing sections have their defaults.

    Without a `teacher`, the objective must not need one; an example is `score(group_mean)`.

    Example: `distill(student={"model": "Qwen/Qwen3-0.6B"},
    teacher={"type": "model", "model": "Qwen/Qwen3-8B"},
    task={"type": "jsonl", "path": "prompts.jsonl"}, objective={"divergence": "jsd(0.3)"},
    train={"steps": 100})`.

    `student`, `teacher` and a `model` inside them may be a path, a hub name or a pair
    `(model, tokenizer)` of transformers' or peft's objects; `task`, and its `path` and `heldout`,
    may be rows, such as a list of dicts or a `datasets.Dataset`, and `task` a pair `(rows,
    verifier)`. Models and rows are copied once into `OUT/NAME.inputs` and never changed. A
    `teacher`, a `task` and a scorer may also be an object with the methods of `practicum.ports`, a
    scorer a function `(prompt, answer) -> float`, and the source of `rollout` a function `(prompt,
    seed) -> str`: see docs/notebooks.md. Give the same objects to resume. A monitor that would
    pause a run only warns, unless `monitors` names it. See `run` for other options and errors.
    """
    sections = {
        "name": name,
        "seed": seed,
        "student": student,
        "teacher": teacher,
        "task": task,
        "objective": objective.model_dump() if isinstance(objective, Objective) else objective,
        "rollout": rollout,
        "optimizer": optimizer,
        "train": train,
        "evaluation": evaluation,
        "monitors": replace_pauses(monitors or {}),
        "backend": backend,
        "reference": reference,
        "scorers": scorers,
        "notes": notes,
        "tracking": tracking,
        "prices": prices,
        "prompt_tokens": prompt_tokens,
        "about": about,
    }
    recipe = build_recipe(sections, Path(out) / f"{name}.inputs")
    check_resumes(resume, allow_changed, overwrite=overwrite)
    with show_progress(console, progress=progress) as screen:
        if not resume:
            check_before_run(recipe)
        return run(
            recipe,
            out=out,
            resume=resume,
            allow_changed=allow_changed,
            overwrite=overwrite,
            console=screen,
        )
