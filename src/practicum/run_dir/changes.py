"""What of a recipe may be changed while a run goes on, and what would not fit what the run has already done."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from practicum.core.calls import did_you_mean
from practicum.errors import RecipeError
from practicum.run_dir.differences import Difference, changes, covers

FLAG = "--allow-changed"

ITS_STATE = (
    "the checkpoint may hold its state, and the steps until now learned from it; let a stage of a pipeline go on with "
    "another one"
)
MAY_CHANGE: Mapping[str, str | None] = {
    "optimizer": None,
    "train": None,
    "monitors": None,
    "rollout": "what the run holds of earlier rollouts was written so; start a new run",
    "rollout.n": None,
    "rollout.max_new_tokens": None,
    "rollout.temperature": None,
    "rollout.top_p": None,
    "rollout.top_k": None,
    "rollout.replay_size": None,
    "evaluation": "the student was measured so before training, and the gain compares the two; once the run is finished, measure "
    "otherwise with practicum eval",
    "evaluation.every": None,
    "name": "it is the run's folder; rename the folder",
    "seed": "the order of the prompts and every random stream come from it; start a new run",
    "student": "the checkpoint holds the weights and moments of this student; start a new run",
    "backend": "the student's state is kept there; start a new run",
    "backend.micro_batch_tokens": None,
    "backend.graph_mib": None,
    "backend.chunk_tokens": None,
    "backend.sampling_batch": None,
    "teacher": ITS_STATE,
    "reference": ITS_STATE,
    "objective": "losses and moments of two objectives cannot be told apart afterwards; write a schedule for a number of it, or a "
    "stage of a pipeline for another one",
    "task": "the order of the prompts and the held-out ones come from it; start a new run",
    "prompt_tokens": "it decides which prompts there are; start a new run",
    "about": None,
    "paper": None,
    "claim": None,
    "differs": None,
    "formula": None,
    "reduced": None,
    "slot": None,
    "base_dir": None,
    "tracking": None,
    "prices": None,
}
"""Places of a recipe, the longest that covers a field decides: None where it may change, else why not."""

DEVICES = re.compile(r"(student|teacher|reference)\.(\S+\.)?(device|residency)")
"""Where the weights of a model are, which may change too."""


def split_changes(
    saved: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str]
) -> tuple[list[Difference], list[Difference]]:
    """Return the changes of a recipe that `allowed` names, and those that it does not.

    Raises RecipeError where it names what is no place of the recipe, or what may not change.
    """
    problems = [problem for key in allowed if (problem := _problem(key, saved, now))]
    if problems:
        raise RecipeError(problems)
    let, refused = [], []
    for difference in changes(saved, now):
        place = _place(difference.field)
        (let if any(covers(key, place) for key in allowed) else refused).append(difference)
    reasons = [(difference, _refusal(_place(difference.field), saved)) for difference in let]
    problems = [f"{difference}: {reason}" for difference, reason in reasons if reason is not None]
    if problems:
        raise RecipeError(problems)
    return let, refused


def proposal(refused: Sequence[Difference], saved: Mapping[str, Any], above: str = "") -> list[str]:
    """Return the line that says how to go on in spite of changes, where any of them may be allowed.

    `above` begins their names where they are of a stage of a pipeline.
    """
    places = dict.fromkeys(
        place
        for difference in refused
        if _refusal(place := _place(difference.field), saved) is None
    )
    flags = " ".join(f"{FLAG} {above}{place}" for place in places)
    return [f"or let the run go on with the change: {flags}"] if places else []


def _place(field: str) -> str:
    """Return the place in a recipe that a field is about: of a schedule the number's that it moves, of a list the list's."""
    return field.removeprefix("schedules.").partition("[")[0]


def _refusal(place: str, saved: Mapping[str, Any]) -> str | None:
    """Return why what is at a place of the recipe cannot change, or None where it can."""
    if DEVICES.fullmatch(place):
        return None
    if place == "rollout.max_new_tokens" and saved["evaluation"]["max_new_tokens"] is None:
        return "evaluation.max_new_tokens was not written, so the student was measured with it before training; start a new run"
    names = place.split(".")
    above = [".".join(names[:count]) for count in range(len(names), 0, -1)]
    return next(
        (MAY_CHANGE[name] for name in above if name in MAY_CHANGE),
        "it is no field that is known; start a new run",
    )


def _problem(key: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a key that is to be allowed, or None."""
    known = {*_places("", saved), *_places("", now)}
    if key not in known:
        changeable = {place for place in known if _refusal(place, saved) is None}
        return f"{FLAG} {key}: the recipe has no such place; {did_you_mean(key, changeable)}"
    below = [place for place in known if covers(key, place)]
    reason = _refusal(key, saved)
    if reason is None or any(_refusal(place, saved) is None for place in below):
        return None
    return f"{FLAG} {key}: {reason}"


def _places(above: str, section: Mapping[str, Any]) -> Iterator[str]:
    """Yield every dotted name in a resolved recipe."""
    for key, value in section.items():
        if key == "schedules":
            continue
        place = f"{above}.{key}" if above else str(key)
        yield place
        if isinstance(value, Mapping):
            yield from _places(place, value)
