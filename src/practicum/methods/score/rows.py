"""Rows of easydistill's SCoRe (arXiv 2509.14257): corrected turns for other trainers.

A row has the conversation before the turn, the turn that was written and the one that it replaces,
each with what was answered to it. A conversation without a wrong turn is a row of its question.
"""

from collections.abc import Sequence
from typing import Any

from practicum.rollouts import RolloutRow
from practicum.types import Prompt, Turn

CORRECTED = "corrected"
"""The note with the number of the corrected turn: `none` was wrong, or `refused` to be written."""

REJECTED = "rejected_turn"
"""The note with the student's wrong turn."""

REPLIED = "rejected_reply"
"""The note with what the wrong turn was answered, if it was."""

NO_STEP = ("chosen", "chosen_observation", "rejected", "rejected_observation", "correct_step")
"""The columns that are empty where no turn was wrong."""


def build_step_row(prompt: Prompt, row: RolloutRow) -> dict[str, Any]:
    """Return the row of one conversation."""
    turns = [turn.to_turn() for turn in row.turns]
    messages = [message.to_json() for message in prompt.messages]
    answer = {"gt_answer": prompt.answer or ""}
    number = row.notes.get(CORRECTED, "none")
    if number == "none":
        return {"prompt": messages, **dict.fromkeys(NO_STEP, ""), **answer}
    place = _find_place(turns, int(number))
    messages += [{"role": turn.role, "content": turn.text} for turn in turns[:place]]
    replies = [turn.text for turn in turns[place + 1 : place + 2]]
    chosen = turns[place].text
    return {
        "prompt": messages,
        "chosen": chosen,
        "chosen_observation": "".join(replies),
        "rejected": row.notes.get(REJECTED, ""),
        "rejected_observation": row.notes.get(REPLIED, ""),
        "correct_step": f"Correct Step: {chosen}",
        **answer,
    }


def _find_place(turns: Sequence[Turn], number: int) -> int:
    """Return the place of the student's turn of a number, counted from 1."""
    places = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
    return places[number - 1]
