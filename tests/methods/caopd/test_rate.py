"""The note with the share of right answers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from practicum.methods.caopd import rate
from practicum.ports.notes import NoteContext, NoteMoment
from practicum.types import (
    Message,
    Prompt,
    Rollout,
)


def answer(text: str, number: int = 0, reward: float | None = 0.0, **changes: Any) -> Rollout:
    prompt = Prompt("p", (Message("user", "ab?"),), answer="ba", privileged={"plan": "turn it"})
    rollout = Rollout.from_text(prompt, text)
    return replace(rollout, sample=number, reward=reward, **changes)


def write(module: Any, rollouts: Sequence[Rollout], task: Any = None, **settings: Any) -> list[Any]:
    """What a note of this kind, without a model, says of the rollouts."""
    context = NoteContext("note", None, task, 0)  # type: ignore[arg-type]
    note = module.build(module.Config(**settings), context)
    return note.write(rollouts, NoteMoment(1, None))  # type: ignore[arg-type]


def test_the_rate_is_of_the_students_answers_to_the_prompt() -> None:
    other = Prompt("q", (Message("user", "b?"),))
    rollouts = [
        answer("ba", 0, 1.0),
        answer("ab", 1, 0.5),
        answer("aa", 2, 0.0),
        answer("ba", 3, 1.0, source="dataset"),
        replace(answer("x", 0, None), prompt=other),
    ]
    assert write(rate, rollouts) == ["0.33", "0.33", "0.33", "0.33", None]
    assert write(rate, rollouts, digits=0)[0] == "0"
