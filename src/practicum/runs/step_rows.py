"""The corrected turns of a run as rows of easydistill's SCoRe (2509.14257), for other trainers.

A row has the conversation before the turn, the turn that was written and the one that it replaces,
each with what was answered to it. A conversation without a wrong turn is a row of its question.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from practicum.errors import DataError, RecipeError
from practicum.rollouts import RolloutRow
from practicum.rollouts.sources.correct import CORRECTED, REJECTED, REPLIED
from practicum.rollouts.sources.correct import Config as Correct
from practicum.run_dir import read_rows, shapes
from practicum.runs.opening import build_task, open_run
from practicum.types import Prompt, Turn

NO_STEP = ("chosen", "chosen_observation", "rejected", "rejected_observation", "correct_step")
"""The columns that are empty where no turn was wrong."""


def write_step_rows(run: Path, target: Path) -> int:
    """Write a run's rows as a JSON list and return their number.

    Raises RecipeError if the run corrects no turns, or if the target exists.
    """
    run_dir, recipe = open_run(run)
    source = recipe.rollout.source
    if not isinstance(source, Correct) or source.start != "corrected":
        raise RecipeError(
            f"{run}: rollout.source is {source.name!r}, and rows of corrected turns come from a run "
            "with rollout.source: correct"
        )
    if target.exists():
        raise RecipeError(f"{target} exists; give another file to --out, or remove it first")
    prompts = {prompt.id: prompt for prompt in build_task(recipe).train_prompts()}
    rows = list(_convert_rows(run_dir.rollouts_jsonl, prompts))
    try:
        target.write_text(json.dumps(rows, ensure_ascii=False, indent=1), encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{target} cannot be written ({error.strerror})") from error
    return len(rows)


def _convert_rows(path: Path, prompts: Mapping[str, Prompt]) -> Iterator[dict[str, Any]]:
    """Yield a row for each conversation whose wrong turn was written, or that has none."""
    for number, saved in enumerate(read_rows(path, shapes.ROLLOUT), start=1):
        fields = {name: saved[name] for name in RolloutRow.model_fields if name in saved}
        row = RolloutRow.model_validate(fields)
        if row.prompt not in prompts:
            raise DataError(
                f"{path}: row {number}: no prompt of the task is called {row.prompt[:40]!a}; "
                "the task's rows have changed since"
            )
        # A turn that its writer did not finish corrects nothing.
        if row.notes.get(CORRECTED) != "refused":
            yield build_step_row(prompts[row.prompt], row)


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
