"""The rollouts from before a step: recorded rollouts, rollouts to replay, and unfinished answers."""

import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from practicum.errors import CapabilityError
from practicum.models.files import digest_file
from practicum.ports import (
    Task,
)
from practicum.recipe import Recipe
from practicum.rollouts import RolloutArchive, Segments
from practicum.text import Renderer
from practicum.training.curriculum import Curriculum
from practicum.types import Prompt, Rollout

log = logging.getLogger(__name__)


def open_segments(recipe: Recipe, task: Task) -> Segments | None:
    """Return an empty store of unfinished answers; None if every answer ends in its step."""
    limit = recipe.rollout.segment_tokens
    if limit is not None and task.converses:
        raise CapabilityError(
            "rollout.segment_tokens: a conversation does not continue in a later step; leave it out"
        )
    return None if limit is None else Segments(limit)


def load_archive(
    recipe: Recipe, prompts: Sequence[Prompt], renderer: Renderer
) -> tuple[RolloutArchive, dict[str, str]]:
    """Return the archive of earlier rollouts, and the digest of the recipe's tape, if any."""
    source = recipe.rollout.source
    newest: deque[Rollout] = deque(maxlen=recipe.rollout.replay_size if source.replays else 0)
    tape = source.load_tape(Path(recipe.base_dir), prompts, renderer, recipe.longest_answer)
    if tape is None:
        return RolloutArchive(newest), {}
    return RolloutArchive(newest, tape.rollouts), {"tape": digest_file(tape.file)}


def load_curriculum(
    recipe: Recipe, prompts: Sequence[Prompt]
) -> tuple[Curriculum | None, dict[str, str]]:
    """Return the curriculum, if any, and the digest of the earlier run that it reads, if any."""
    config = recipe.train.curriculum
    if config is None:
        return None, {}
    curriculum = Curriculum(
        prompts, *config.pass_rate, config.rise, config.powers, is_live=config.run is None
    )
    if config.run is None:
        return curriculum, {}
    path = config.run.find_rollouts(Path(recipe.base_dir))
    curriculum.read_run(path)
    log.info(
        f"curriculum: {len(curriculum.list_chosen())} of {len(prompts)} prompts, by the answers in {path}"
    )
    return curriculum, {"curriculum": digest_file(path)}
