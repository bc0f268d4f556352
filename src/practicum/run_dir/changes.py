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
    "the checkpoint may hold its state, and earlier steps learned from it; "
    "change it in a new stage of a pipeline"
)
MAY_CHANGE = re.compile(
    r"(optimizer|train|monitors|about|family|paper|claim|differs|formula|reduced|teacher_effect|slot|base_dir"
    r"|tracking|prices|rollout\.(n|max_new_tokens|temperature|top_p|top_k|replay_size)|evaluation\.every"
    r"|backend\.(micro_batch_tokens|graph_mib|chunk_tokens|sampling_batch|decoding))(\..*)?"
    r"|(student|teacher|reference)\.(\S+\.)?(device|residency)"
)
"""The fields of a recipe that may change. The last alternatives place the weights of a model."""

MUST_STAY = {
    "rollout": "the run's earlier rollouts were written with this setting; start a new run",
    "evaluation": "the student was measured with this setting before training, and the gain compares both "
    "measurements; after the run, use practicum eval for other settings",
    "name": "it is the run's folder; rename the folder",
    "seed": "it determines the order of the prompts and every random stream; start a new run",
    "student": "the checkpoint holds the weights and moments of this student; start a new run",
    "backend": "the student's state is kept there; start a new run",
    "teacher": HAS_STATE,
    "reference": HAS_STATE,
    "scorers": HAS_STATE,
    "notes": HAS_STATE,
    "objective": "losses and moments of two objectives would be mixed; "
    "use a schedule to change a number, or a stage of a pipeline to change the objective",
    "task": "it determines the order of the prompts and the held-out prompts; start a new run",
    "prompt_tokens": "it selects the prompts; start a new run",
}
"""The sections of a recipe with fields that may not change, with the reasons."""


def split_changes(
    saved: Mapping[str, Any], current: Mapping[str, Any], allowed: Sequence[str]
) -> tuple[list[Difference], list[Difference]]:
    """Split the changes of a recipe into changes that `allowed` names and all further changes.

    Raises RecipeError if `allowed` names no field of the recipe, or a field that may not change.
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
    """Return a line with flags for all changes that may be allowed; empty if there are no such changes.

    `prefix` begins the names of fields in a stage of a pipeline.
    """
    places = dict.fromkeys(_find_place(difference.field) for difference in refused)
    allowed = [f"{prefix}{place}" for place in places if _explain_refusal(place, saved) is None]
    if not allowed:
        return []
    return [f"or resume the run with the change: {spell_options(allow_changed=allowed)}"]


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
    return MUST_STAY.get(section, "it is an unknown field; start a new run")


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
