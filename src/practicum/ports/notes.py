"""The protocols of notes: texts about rollouts that are made between reward and score.

A new kind is one file in `practicum/notes`, or your own module: see docs/notes.md.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from practicum.ports import (
    Capabilities,
    PartConfig,
    SamplingClient,
    StepFollower,
    Task,
    Teacher,
)
from practicum.text import Renderer
from practicum.types import Rollout


@dataclass(frozen=True, slots=True)
class NoteMoment:
    """The step in which notes are made, and the student's client at that time."""

    step: int
    student: SamplingClient


class Note(StepFollower):
    """A kind of text about rollouts. By default it keeps no state between steps."""

    def write(self, rollouts: Sequence[Rollout], moment: NoteMoment) -> list[str | None]:
        """Return one text per rollout, in order; None for a rollout without a text.

        The rollouts have their rewards and the notes before this one in the recipe. A text depends
        on the seed, the step and the rollouts, never on the clock.
        """
        raise NotImplementedError


class NoteConfig(PartConfig):
    """The settings of a note in a recipe. By default it calls no model and keeps no state."""

    def find_problems(
        self, name: str, notes: Sequence[str], models: Mapping[str, Capabilities]
    ) -> list[str]:
        """List the problems that prevent the note, given the recipe's notes and models.

        `models` are teacher and, if there is one, reference.
        """
        return []

    def follows_student(self, models: Mapping[str, Capabilities]) -> bool:
        """Return True if it needs the newest student or earlier steps, so that no step runs ahead."""
        return False


@dataclass(frozen=True, slots=True)
class NoteContext:
    """The objects from which a note is built."""

    name: str
    """Its name in the recipe."""
    renderer: Renderer
    """The student's renderer: turns messages into tokens."""
    task: Task
    """The source of the prompts, with the verifier."""
    seed: int
    """The seed of everything random in this note."""
    models: Mapping[str, Teacher] = field(default_factory=dict)
    """The recipe's teacher and, if there is one, its reference."""
    build_teacher: Callable[[Any], Teacher] | None = None
    """Build another teacher by its settings; its costs are counted under the note's name."""


def name_note_role(note: str) -> str:
    """Return the role of a note, under which its costs and its state are kept."""
    return f"note-{note}"
