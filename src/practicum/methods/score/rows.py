"""Export corrected turns as rows of easydistill's SCoRe (arXiv 2509.14257), for other trainers.

A row has the conversation before the turn, the corrected turn, and the wrong turn, each turn with
its reply. The row of a conversation without a wrong turn only has the question.
"""

from collections.abc import Sequence
from typing import Any

from practicum.rollouts import RolloutRow
from practicum.types import Prompt, Turn

CORRECTED = "corrected"
"""The note with the number of the corrected turn.

`none` if no turn was wrong, `refused` if the writer did not finish the correction.
"""

REJECTED = "rejected_turn"
"""The note with the student's wrong turn."""

REPLIED = "rejected_reply"
"""The note with the reply to the wrong turn, if it had a reply."""

NO_STEP = ("chosen", "chosen_observation", "rejected", "rejected_observation", "correct_step")
"""The columns that are empty if no turn was wrong."""


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
    """Return the place of the student's turn with this number, counted from 1."""
    places = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
    return places[number - 1]
