"""The note with the share of right answers."""

from dataclasses import replace

from noted import answer, write_notes

from practicum.methods.caopd import rate
from practicum.types import (
    Message,
    Prompt,
)


def test_the_rate_is_of_the_students_answers_to_the_prompt() -> None:
    other = Prompt("q", (Message("user", "b?"),))
    rollouts = [
        answer("ba", 0, 1.0),
        answer("ab", 1, 0.5),
        answer("aa", 2, 0.0),
        answer("ba", 3, 1.0, source="dataset"),
        replace(answer("x", 0, None), prompt=other),
    ]
    assert write_notes(rate, rollouts) == ["0.33", "0.33", "0.33", "0.33", None]
    assert write_notes(rate, rollouts, digits=0)[0] == "0"
