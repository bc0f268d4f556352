"""A run from its recipe to its report: evaluate, train, checkpoint, evaluate again, write everything down.

`metrics.jsonl`, `rollouts.jsonl` and `summary.json` hold nothing that depends on the clock, so a run that was killed and
resumed leaves the same bytes as one that was not; seconds go to `timings.jsonl`.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from practicum import run_dir as folders
from practicum.core.notes import hide_notes, show_notes
from practicum.core.stopping import Stop, catch_stop_signals
from practicum.errors import CheckpointError, RecipeError
from practicum.objective import Objective
from practicum.ports import Backend, Learner
from practicum.recipe import Recipe, load_recipe, parse_recipe
from practicum.run_dir import RunDir
from practicum.runs.assembly import RunComponents, assemble_run, load_student
from practicum.runs.console import Console, SilentConsole
from practicum.runs.resuming import open_run
from practicum.runs.session import RunResult, Session
from practicum.runs.state import require_newest, teacher_tensors
from practicum.runs.tracked import RunTracker

__all__ = [
    "RunResult",
    "Section",
    "check_resumes",
    "distill",
    "open_run",
    "open_student",
    "restored",
    "run",
]

Section = Mapping[str, Any]
"""A section of a recipe as data, for example `{"type": "self", "weights": "frozen"}`."""


def run(
    recipe: Recipe | str | Path,
    overrides: Sequence[str] = (),
    *,
    out: str | Path = "runs",
    resume: bool = False,
    allow_changed: Sequence[str] = (),
    console: Console | None = None,
    stop: Stop | None = None,
) -> RunResult:
    """Run a recipe in a folder of `out` named after it; with `resume`, go on from its newest good checkpoint.

    `allow_changed` names the places of the recipe that may be other than when the run began, such as
    `optimizer.learning_rate`. `stop` is asked after every step; without it the run listens for SIGINT and SIGTERM itself.
    Without a console what there is to note is logged under `practicum`. Raises a PracticumError with its documented exit code;
    what was computed until then is in the run folder.
    """
    check_resumes(resume, allow_changed)
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    home = RunDir.open(Path(out) / recipe.name) if resume else RunDir.create(Path(out), recipe.name)
    notes = show_notes(console.event) if console else nullcontext()
    signals = nullcontext(stop) if stop else catch_stop_signals()
    with (
        notes,
        home.lock(),
        signals as asked,
        RunTracker.open(recipe, home) as tracked,
        ExitStack() as at_end,
    ):
        return Session(home, recipe, console or SilentConsole(), asked, tracked, at_end).go(
            resume, allow_changed
        )


def check_resumes(resume: bool, allow_changed: Sequence[str]) -> None:
    """Raise RecipeError where changes are allowed to a run that is to begin."""
    if allow_changed and not resume:
        raise RecipeError(
            f"{folders.FLAG} {allow_changed[0]}: a run that begins has nothing to change; add --resume"
        )


def distill(  # noqa: PLR0913  (the sections of a recipe, by name)
    *,
    student: Section,
    teacher: Section,
    task: Section,
    objective: Section | Objective | None = None,
    rollout: Section | None = None,
    optimizer: Section | None = None,
    train: Section,
    evaluation: Section | None = None,
    monitors: Section | None = None,
    name: str = "distill",
    seed: int = 0,
    out: str | Path = "runs",
    resume: bool = False,
    allow_changed: Sequence[str] = (),
    console: Console | None = None,
) -> RunResult:
    """Run a recipe given as its sections, each as it stands in YAML; what is left out has the recipe's default.

    Example: `distill(student={"model": "Qwen/Qwen3-0.6B"}, teacher={"type": "model", "model": "Qwen/Qwen3-8B"},
    task={"type": "jsonl", "path": "prompts.jsonl"}, objective={"divergence": "jsd(0.3)"}, train={"steps": 100})`.
    Raises RecipeError with every problem found.
    """
    sections = {
        "student": student,
        "teacher": teacher,
        "task": task,
        "objective": objective.model_dump() if isinstance(objective, Objective) else objective,
        "rollout": rollout,
        "optimizer": optimizer,
        "train": train,
        "evaluation": evaluation,
        "monitors": monitors,
    }
    given = {key: section for key, section in sections.items() if section is not None}
    recipe = parse_recipe({"name": name, "seed": seed, **given}, "distill")
    return run(recipe, out=out, resume=resume, allow_changed=allow_changed, console=console)


def open_student(path: str | Path) -> tuple[Backend, Learner]:
    """Load the student of a run with the weights of its newest good checkpoint, and the backend that holds it."""
    home, recipe = open_run(path)
    checkpoint = require_newest(home)
    if not recipe.backend.checkpoints_here:
        where = ", ".join(checkpoint.tensors("student"))
        raise CheckpointError(
            f"{path}: the student is at a service, {where}, and its weights are not here; ask the service"
        )
    backend, student = load_student(recipe, home.models)
    backend.load(student, checkpoint.path, moments=False)
    return backend, student


def restored(home: RunDir, recipe: Recipe) -> RunComponents:
    """The parts of a run with the weights of its newest good checkpoint."""
    with hide_notes():
        components = assemble_run(recipe, home.models)
    checkpoint = require_newest(home)
    components.backend.load(components.learner, checkpoint.path, moments=False)
    components.parts.teacher.load_state(teacher_tensors(checkpoint))
    return components
