"""The placeholder texts of a rollout by name, for notes and privileged teachers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from practicum.statistics import group_pairs
from practicum.types import Message, Prompt, Rollout

Outcome = Literal["correct", "incorrect", "unknown"]

ROLLOUT_FIELDS = ("attempt", "outcome", "sibling")
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


def list_rollout_fields(
    rollout: Rollout, successes: Mapping[str, Sequence[Rollout]]
) -> dict[str, str]:
    """Return the placeholder texts of a completion: notes and the known `ROLLOUT_FIELDS`."""
    fields = {**rollout.notes, "attempt": rollout.text}
    if classify_outcome(rollout) != "unknown":
        fields["outcome"] = classify_outcome(rollout)
    for sibling in successes.get(rollout.prompt.id, ()):
        if sibling is not rollout:
            return {**fields, "sibling": sibling.text}
    return fields


def find_successes(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Return the correct completions of each prompt, in the order of their sample numbers."""
    ordered = sorted(rollouts, key=lambda rollout: rollout.sample)
    correct = [rollout for rollout in ordered if classify_outcome(rollout) == "correct"]
    return group_pairs((rollout.prompt.id, rollout) for rollout in correct)


def show_text(
    messages: Sequence[Message], text: str, place: Literal["question", "answer"]
) -> tuple[Message, ...]:
    """Return the messages with a text before the last one, or as the beginning of the answer."""
    if place == "answer":
        return (*messages, Message("assistant", f"{text}\n\n"))
    *earlier, last = messages
    return (*earlier, replace(last, content=f"{text}\n\n{last.content}"))
