"""What a checkpoint holds of a run, and how a run goes back to one."""

import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from practicum import run_dir as folders
from practicum.errors import CheckpointError, RecipeError
from practicum.recipe import Recipe
from practicum.rollouts import replays
from practicum.run_dir import Checkpoint, RunDir
from practicum.runs.assembly import RunComponents
from practicum.runs.records import RunJournals
from practicum.training.asynchronous import Stages

log = logging.getLogger(__name__)


def find_newest(home: RunDir, recipe: Recipe) -> Checkpoint | None:
    """Find the newest checkpoint that verifies; RecipeError where the recipe ends before it."""
    checkpoint, warnings = folders.find_checkpoint(home)
    for warning in warnings:
        log.warning(warning)
    if checkpoint is not None and checkpoint.step > recipe.train.steps:
        raise RecipeError(
            f"train.steps is {recipe.train.steps}, and {home.path} has done {checkpoint.step} already; write at "
            f"least {checkpoint.step}"
        )
    return checkpoint


def require_newest(home: RunDir) -> Checkpoint:
    """Find the newest checkpoint that verifies; CheckpointError where there is none."""
    checkpoint, _ = folders.find_checkpoint(home)
    if checkpoint is None:
        raise CheckpointError(
            f"{home.path}: no checkpoint yet; resume the run, or give a model folder instead"
        )
    return checkpoint


def restore(
    home: RunDir, recipe: Recipe, built: RunComponents, checkpoint: Checkpoint | None
) -> None:
    """Load a checkpoint, or none, and cut the journals back to it."""
    step = 0 if checkpoint is None else checkpoint.step
    with RunJournals(home) as records:
        records.truncate_after(step)
    if checkpoint is None:
        return
    for line in folders.compare_versions(
        checkpoint.versions, folders.current_versions(built.packages)
    ):
        log.warning(f"{line}; bit-exact resume is not promised")
    built.backend.load(built.learner, checkpoint.path)
    for role, teacher in built.teachers().items():
        teacher.load_state(teacher_tensors(checkpoint, role))
    built.courses.load_state(checkpoint.state.get("schedules", {}))
    if replays(recipe.rollout.source):
        rows = folders.read_rows(home.rollouts_jsonl, folders.shapes.ROLLOUT)
        built.parts.archive.restore(rows, built.parts.prompts, step)
    log.info(f"resumed after step {step}")


def save(
    home: RunDir, recipe: Recipe, built: RunComponents, ahead: Stages, step: int, tag: str | None
) -> None:
    """Write the checkpoint of a step, with what was begun ahead of it; `tag` is why it is to be kept."""
    tensors = teacher_states(built, ahead.teacher_state)
    state = {"step": step, "schedules": built.courses.save_state()}
    begun = ahead.save_state()
    if begun:
        state["begun"] = begun
    folders.save_checkpoint(
        home,
        step,
        tensors,
        state,
        writer=folders.Writer(
            lambda folder: built.backend.save(built.learner, folder), built.learner.state_bytes
        ),
        keep=recipe.train.keep_checkpoints,
        tag=tag,
        packages=built.packages,
    )


def check_space(home: RunDir, built: RunComponents) -> None:
    """Raise ResourceError where the disk has no room for a checkpoint."""
    states = teacher_states(built, lambda role: None)
    size = sum(tensor.nbytes for named in states.values() for tensor in named.values())
    folders.check_space(home, built.learner.state_bytes + size)


def teacher_states(
    built: RunComponents, newest: Callable[[str], Mapping[str, Tensor] | None]
) -> dict[str, dict[str, Tensor]]:
    """Return what a checkpoint holds of the teachers; `newest` is the state of one that is asked ahead."""
    tensors: dict[str, dict[str, Tensor]] = {}
    for role, teacher in built.teachers().items():
        known = newest(role)
        own = teacher.save_state() if known is None else dict(known)
        if own:
            tensors[role] = own
    return tensors


def teacher_tensors(checkpoint: Checkpoint, role: str = "teacher") -> dict[str, Tensor]:
    """Return the own tensors of the teacher or of the reference, where it has any."""
    return checkpoint.tensors(role) if (checkpoint.path / f"{role}.safetensors").is_file() else {}
