"""Rollouts to make notes about, and notes that need no model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from practicum.ports.notes import NoteContext, NoteMoment
from practicum.types import Message, Prompt, Rollout


def answer(text: str, number: int = 0, reward: float | None = 0.0, **changes: Any) -> Rollout:
    prompt = Prompt("p", (Message("user", "ab?"),), answer="ba", privileged={"plan": "turn it"})
    rollout = Rollout.from_text(prompt, text)
    return replace(rollout, sample=number, reward=reward, **changes)


def write_notes(
    module: Any, rollouts: Sequence[Rollout], task: Any = None, **settings: Any
) -> list[Any]:
    """Return the notes that a kind without a model makes about the rollouts."""
    context = NoteContext("note", None, task, 0)  # type: ignore[arg-type]
    note = module.build(module.Config(**settings), context)
    return note.write(rollouts, NoteMoment(1, None))  # type: ignore[arg-type]
