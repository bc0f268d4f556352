"""The placeholder texts of a rollout by name, for notes and privileged teachers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from practicum.pictures import hide_places
from practicum.statistics import group_pairs
from practicum.types import Message, Prompt, Rollout

Outcome = Literal["correct", "incorrect", "unknown"]

SIBLINGS: Mapping[str, Outcome] = {"sibling": "correct", "failed_sibling": "incorrect"}
"""The placeholders for another completion of the prompt, with its outcome; it may be missing."""

ROLLOUT_FIELDS = ("attempt", "outcome", *SIBLINGS)
"""The placeholders for the completion itself and for the prompt's other completions."""


def classify_outcome(rollout: Rollout) -> Outcome:
    """Return `correct` from reward 1 on, `incorrect` below it, `unknown` without a reward."""
    if rollout.reward is None:
        return "unknown"
    return "correct" if rollout.reward >= 1 else "incorrect"


def list_prompt_fields(prompt: Prompt) -> dict[str, str]:
    """Return the placeholder texts of a prompt; names in `ROLLOUT_FIELDS` are reserved."""
    fields = {"question": prompt.question, "answer": prompt.answer, **prompt.privileged}
    texts = {name: value for name, value in fields.items() if value is not None}
    return {name: text for name, text in texts.items() if name not in ROLLOUT_FIELDS}


def list_rollout_fields(rollouts: Sequence[Rollout], number: int = 0) -> list[dict[str, str]]:
    """Return each completion's placeholder texts: its notes and its known `ROLLOUT_FIELDS`.

    A sibling is another completion with the outcome: the first by sample number, or after `number`
    siblings.
    """
    outcomes = [classify_outcome(rollout) for rollout in rollouts]
    ordered = sorted(zip(rollouts, outcomes, strict=True), key=lambda pair: pair[0].sample)
    groups = group_pairs(((rollout.prompt.id, outcome), rollout) for rollout, outcome in ordered)
    listed = []
    for rollout, outcome in zip(rollouts, outcomes, strict=True):
        fields = {**rollout.notes, "attempt": rollout.text}
        if outcome != "unknown":
            fields["outcome"] = outcome
        for name, of_sibling in SIBLINGS.items():
            group = groups.get((rollout.prompt.id, of_sibling), ())
            siblings = [member for member in group if member is not rollout]
            if number < len(siblings):
                fields[name] = siblings[number].text
        listed.append(fields)
    return listed


def show_text(
    messages: Sequence[Message], text: str, place: Literal["question", "answer"]
) -> tuple[Message, ...]:
    """Return the messages with a text before the last one, or as the beginning of the answer."""
    if place == "answer":
        return (*messages, Message("assistant", f"{text}\n\n"))
    *earlier, last = messages
    # A model may have written the text.
    text = hide_places(text) if last.images else text
    return (*earlier, replace(last, content=f"{text}\n\n{last.content}"))
