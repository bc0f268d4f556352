"""The rollouts from before a step: recorded rollouts, rollouts to replay, and unfinished answers."""

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
from practicum.types import Prompt, Rollout


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
