"""Save a run's state in checkpoints, and restore a run from one."""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from practicum import run_dir as folders
from practicum.core.notes import hide_notes
from practicum.errors import RecipeError
from practicum.models.tensors import SavedTensor, copy_to_host
from practicum.recipe import Recipe
from practicum.run_dir import Checkpoint, RunDir
from practicum.runs.assembly import RunComponents, assemble_run
from practicum.runs.opening import require_checkpoint
from practicum.runs.records import RunJournals, check_journals, truncate_journals
from practicum.training.asynchronous import StepRunner

log = logging.getLogger(__name__)


def find_newest(run_dir: RunDir, recipe: Recipe) -> Checkpoint | None:
    """Return the newest intact checkpoint.

    Raises RecipeError if the recipe ends before it, CheckpointError if a journal has other rows.
    """
    checkpoint, warnings = folders.find_checkpoint(run_dir)
    for warning in warnings:
        log.warning(warning)
    if checkpoint is not None and checkpoint.step > recipe.train.steps:
        raise RecipeError(
            f"train.steps is {recipe.train.steps}, and {run_dir.path} has done {checkpoint.step} "
            f"already; set at least {checkpoint.step}"
        )
    if checkpoint is not None:
        check_journals(run_dir, checkpoint)
    return checkpoint


def restore(
    run_dir: RunDir, recipe: Recipe, components: RunComponents, checkpoint: Checkpoint | None
) -> None:
    """Load a checkpoint, if there is one, and remove the rows after it from the journals."""
    # The steps after the checkpoint are repeated and write their rows again.
    truncate_journals(run_dir, checkpoint)
    if checkpoint is None:
        return
    step = checkpoint.step
    versions = folders.collect_versions(components.packages)
    for line in folders.compare_versions(checkpoint.versions, versions):
        log.warning(f"{line}; bit-exact resume is not promised")
    components.backend.load(components.student, checkpoint.path)
    load_followers(components, checkpoint)
    components.schedule_state.load_state(checkpoint.state.get("schedules", {}))
    parts = components.parts
    if parts.segments is not None:
        parts.segments.load_state(checkpoint.state.get("open_answers", []), parts.prompts)
    if parts.curriculum is not None:
        parts.curriculum.load_state(checkpoint.state.get("curriculum", {}))
    if recipe.rollout.source.replays:
        rows = folders.read_rows(run_dir.rollouts_jsonl, folders.shapes.ROLLOUT)
        parts.archive.restore(rows, parts.prompts, step)
    log.info(f"resumed after step {step}")


def prepare_save(  # noqa: PLR0913  (the parts of a run's state)
    run_dir: RunDir,
    recipe: Recipe,
    components: RunComponents,
    runner: StepRunner,
    records: RunJournals,
    step: int,
    tag: str | None = None,
    *,
    kept_step: int | None = None,
    is_copied: bool = False,
) -> Callable[[], None]:
    """Return a function that writes the checkpoint of a step with the steps in flight.

    `tag` protects it from pruning, and the checkpoint of `kept_step` is not pruned either. With
    `is_copied` it is written from a copy of the state in this machine's memory, while the training
    continues.
    """
    tensors = collect_follower_states(components, runner.get_state)
    state = {"step": step, "schedules": components.schedule_state.save_state()}
    if in_flight := runner.save_state():
        state["begun"] = in_flight
    segments = components.parts.segments
    if segments is not None:
        state["open_answers"] = segments.save_state()
    if (curriculum := components.parts.curriculum) is not None:
        state["curriculum"] = curriculum.save_state()
    backend, student, journals = components.backend, components.student, records.record()
    if is_copied:
        tensors = {role: copy_to_host(named) for role, named in tensors.items()}
        write = backend.copy_state(student)
    else:
        write = partial(backend.save, student)

    def save() -> None:
        folders.save_checkpoint(
            run_dir,
            step,
            tensors,
            state,
            writer=folders.CheckpointWriter(write, student.state_bytes),
            keep=recipe.train.keep_checkpoints,
            kept_step=kept_step,
            tag=tag,
            packages=components.packages,
            journals=journals,
        )

    return save


def check_space(run_dir: RunDir, components: RunComponents) -> None:
    """Raise ResourceError if the disk has no room for a checkpoint."""
    states = collect_follower_states(components, lambda role: None)
    size = sum(tensor.nbytes for named in states.values() for tensor in named.values())
    folders.check_space(run_dir, components.student.state_bytes + size)


def collect_follower_states(
    components: RunComponents, newest: Callable[[str], Mapping[str, SavedTensor] | None]
) -> dict[str, Mapping[str, SavedTensor]]:
    """Return the tensors of teachers and scorers by role.

    `newest(role)` is the state after the newest step of a role that is queried ahead, else None.
    """
    states: dict[str, Mapping[str, SavedTensor]] = {}
    for role, follower in components.parts.followers.items():
        # The state of a teacher that is queried ahead has advanced with the steps in flight.
        state = newest(role)
        tensors = follower.save_state() if state is None else state
        if tensors:
            states[role] = tensors
    return states


def load_followers(components: RunComponents, checkpoint: Checkpoint) -> None:
    """Restore the teachers and scorers that saved a state."""
    for role, follower in components.parts.followers.items():
        follower.load_state(load_role_tensors(checkpoint, role))


def load_role_tensors(checkpoint: Checkpoint, role: str) -> dict[str, Tensor]:
    """Return the saved tensors of a teacher or scorer by its role, empty if it has none."""
    is_saved = (checkpoint.path / f"{role}.safetensors").is_file()
    return checkpoint.read_tensors(role) if is_saved else {}


def restore_components(run_dir: RunDir, recipe: Recipe) -> RunComponents:
    """Assemble a run with the weights of its newest intact checkpoint."""
    with hide_notes():
        components = assemble_run(recipe, run_dir.models)
    checkpoint = require_checkpoint(run_dir)
    components.backend.load(components.student, checkpoint.path, moments=False)
    load_followers(components, checkpoint)
    return components
