"""Decide which changes of a recipe a resumed run accepts, and explain the refusal of others."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from practicum.core.calls import parse_call, suggest_name
from practicum.core.options import spell_options
from practicum.core.plugins import load_plugin
from practicum.errors import RecipeError
from practicum.rollouts import SOURCES
from practicum.run_dir.differences import Difference, find_changes, is_below

HAS_STATE = (
    "the checkpoint may hold its state, and the steps until now learned from it; "
    "let a stage of a pipeline go on with another one"
)
MAY_CHANGE = re.compile(
    r"(optimizer|train|monitors|about|family|paper|claim|differs|formula|reduced|slot|base_dir|tracking"
    r"|prices|rollout\.(n|max_new_tokens|temperature|top_p|top_k|replay_size)|evaluation\.every"
    r"|backend\.(micro_batch_tokens|graph_mib|chunk_tokens|sampling_batch|decoding))(\..*)?"
    r"|(student|teacher|reference)\.(\S+\.)?(device|residency)"
)
"""The places of a recipe that may change. The last ones place the weights of a model."""

MUST_STAY = {
    "rollout": "what the run holds of earlier rollouts was written so; start a new run",
    "evaluation": "the student was measured so before training, and the gain compares the two; "
    "once the run is finished, measure otherwise with practicum eval",
    "name": "it is the run's folder; rename the folder",
    "seed": "the order of the prompts and every random stream come from it; start a new run",
    "student": "the checkpoint holds the weights and moments of this student; start a new run",
    "backend": "the student's state is kept there; start a new run",
    "teacher": HAS_STATE,
    "reference": HAS_STATE,
    "scorers": HAS_STATE,
    "notes": HAS_STATE,
    "objective": "losses and moments of two objectives cannot be told apart afterwards; "
    "write a schedule for a number of it, or a stage of a pipeline for another one",
    "task": "the order of the prompts and the held-out ones come from it; start a new run",
    "prompt_tokens": "it decides which prompts there are; start a new run",
}
"""The sections of a recipe whose other places may not change, with the reasons."""


def split_changes(
    saved: Mapping[str, Any], current: Mapping[str, Any], allowed: Sequence[str]
) -> tuple[list[Difference], list[Difference]]:
    """Return the changes of a recipe that `allowed` names, and those that it does not.

    Raises RecipeError if `allowed` names no place of the recipe, or one that may not change.
    """
    problems = [problem for key in allowed if (problem := _find_problem(key, saved, current))]
    if problems:
        raise RecipeError(problems)
    accepted, refused = [], []
    moves = _can_move(saved, current)
    for difference in find_changes(saved, current):
        place = _find_place(difference.field)
        if not any(is_below(key, place) for key in allowed):
            refused.append(difference)
        elif moves and is_below("backend", place):
            accepted.append(difference)
        elif (reason := _explain_refusal(place, saved)) is not None:
            problems.append(f"{difference}: {reason}")
        else:
            accepted.append(difference)
    if problems:
        raise RecipeError(problems)
    return accepted, refused


def propose_flags(
    refused: Sequence[Difference], saved: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Return a line with the flags that allow those of the changes that may be allowed, if any.

    `prefix` begins the names of fields in a stage of a pipeline.
    """
    places = dict.fromkeys(_find_place(difference.field) for difference in refused)
    allowed = [f"{prefix}{place}" for place in places if _explain_refusal(place, saved) is None]
    if not allowed:
        return []
    return [f"or let the run go on with the change: {spell_options(allow_changed=allowed)}"]


def _can_move(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Return True if the run goes to another backend that opens the same checkpoints."""
    types = {recipe.get("backend", {}).get("type", "local") for recipe in (saved, current)}
    configs = [load_plugin("backends", name).Config for name in sorted(types)]
    return len(types) > 1 and all(config.checkpoints_here for config in configs)


def _find_place(field: str) -> str:
    """Return the place that a field is about: a schedule's number, or the list of a list's item."""
    return field.removeprefix("schedules.").partition("[")[0]


def _explain_refusal(place: str, saved: Mapping[str, Any]) -> str | None:
    """Return the reason why a place of the recipe cannot change, or None if it can."""
    if place == "rollout.max_new_tokens" and saved["evaluation"]["max_new_tokens"] is None:
        return (
            "evaluation.max_new_tokens was not written, so the student was measured with it "
            "before training; start a new run"
        )
    source = load_plugin(SOURCES, parse_call(saved["rollout"]["source"])[0]).Config
    if place in source.fixed:
        return source.fixed[place]
    if MAY_CHANGE.fullmatch(place):
        return None
    section = place.partition(".")[0]
    return MUST_STAY.get(section, "it is no field that is known; start a new run")


def _find_problem(key: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """Return the reason against allowing changes at a place, or None."""
    places = {*_list_places("", saved), *_list_places("", current)}
    changeable = {place for place in places if _explain_refusal(place, saved) is None}
    if key not in places:
        return f"{spell_options(allow_changed=[key])}: the recipe has no such place; {suggest_name(key, changeable)}"
    if any(is_below(key, place) for place in changeable):
        return None
    return f"{spell_options(allow_changed=[key])}: {_explain_refusal(key, saved)}"


def _list_places(above: str, section: Mapping[str, Any]) -> Iterator[str]:
    """Yield every dotted name in a resolved recipe."""
    for key, content in section.items():
        if key == "schedules":
            continue
        place = f"{above}.{key}" if above else str(key)
        yield place
        if isinstance(content, Mapping):
            yield from _list_places(place, content)
