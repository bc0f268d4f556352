"""The control of a recipe that joins a reward and a teacher: the same run with the teacher off, the reward alone.

A teacher here is whoever is learned from besides the verifier: the one under `teacher:`, and whoever wrote the answers that a
source takes from the dataset. The reference is none: it holds the student near to where it began.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from practicum.errors import RecipeError
from practicum.functional.estimators import CORRECTIONS
from practicum.monitors import number_at
from practicum.objective import Term
from practicum.objective.spec import OTHER_ANSWERS
from practicum.recipe.mistakes import validated
from practicum.recipe.schema import Recipe, resolved
from practicum.rollouts import StudentSource, other_writer

SWITCH = "teacher=off"
"""The override that asks for the control; YAML reads its value as false."""

SECTIONS = ("teacher", "rollout", "objective", "schedules", "monitors")
"""The sections of a recipe that differ in its control."""

SUFFIX = "-teacher-off"
"""Ends the name of a control, and so that of its run folder."""

LONGEST_NAME = 80

TAKEN_OVER = ("coefficient", "correction", "weights", "samples", "filter", "source")
"""Fields of a term that are about its answers and tokens, whoever teaches on them."""


def teacher_off(recipe: Recipe) -> Recipe | None:
    """Return the recipe with the reward alone, or None where it has no teacher, or without it nothing learned from a reward.

    Terms that ask the teacher, or are about answers that it wrote, are gone; a reward that joins the teacher's advantage stays
    as a term of its own. The student writes all of its `n` answers. What a filter left to a teacher is the reward's again.
    Raises RecipeError where a schedule cannot be taken over.
    """
    writer = other_writer(recipe.rollout.source)
    terms = recipe.objective.losses
    if writer is None and not any(term.asks_teacher for term in terms):
        return None
    alone = [
        None if writer is not None and _imitates(term, writer) else _alone(term) for term in terms
    ]
    left_to_teacher = {term.filter for term, left in zip(terms, alone, strict=True) if left is None}
    places = {
        place: _with_answers(left, left_to_teacher)
        for place, left in enumerate(alone)
        if left is not None
    }
    if not any(term.learns_from_reward for term in places.values()):
        return None
    data = resolved(recipe)
    data |= control_words(data)
    data["teacher"] = {"type": "none"}
    data["objective"]["losses"] = [term.model_dump(mode="json") for term in places.values()]
    if writer is not None:
        data["rollout"]["source"] = StudentSource().model_dump()
    moved = _Moved(recipe, places, writer is not None)
    data["schedules"] = moved.taken_over(data["schedules"])
    for settings in data["monitors"].values():
        settings["set"] = {
            path: change
            for path, change in moved.taken_over(settings["set"]).items()
            if _is_at(data, path)
        }
    return validated(Recipe, data, recipe.name)


def control_words(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a control says about itself instead of what its recipe's data says: it reproduces no paper."""
    about = f"control: the reward alone, the teacher off, of: {data.get('about') or data['name']}"
    name = f"{data['name'][: LONGEST_NAME - len(SUFFIX)]}{SUFFIX}"
    return {"name": name, "about": about, "paper": None, "claim": None, "differs": None}


def no_control(source: str) -> RecipeError:
    """Return the error of a recipe that is asked for its control and has none."""
    return RecipeError(
        f"{source}: {SWITCH} leaves the reward alone, and this recipe has no teacher, or without it nothing that learns from a "
        "reward; take one that joins the two, such as papers/kdrl, or write reward: add_advantage(1.0)"
    )


def without_switch(overrides: Sequence[str]) -> tuple[list[str], bool]:
    """Return the overrides without `teacher=off`, and whether it was among them."""
    rest = [text for text in overrides if text.replace(" ", "") != SWITCH]
    return rest, len(rest) < len(overrides)


def _imitates(term: Term, writer: str) -> bool:
    """Return whether a term is about answers that another wrote: those alone, or likelihood for its own sake."""
    likelihood = term.signal.label and not term.learns_from_reward
    return term.source == writer or (likelihood and term.source == "all")


def _alone(term: Term) -> Term | None:
    """Return the term as it is without a teacher: itself where it asks none, its reward where it has one, else None."""
    if not term.asks_teacher:
        return term
    if term.reward.by_itself is None:
        return None
    of_teacher = [
        *(["weights"] if term.weighs_by_teacher else []),
        *(["samples"] if term.samples_by_teacher else []),
    ]
    fields = {key: value for key, value in term if key in TAKEN_OVER and key not in of_teacher}
    arguments = {**term.correction.arguments, **CORRECTIONS[term.correction.name].without_teacher}
    correction = term.correction.model_copy(update={"arguments": arguments})
    coefficient = term.coefficient * term.reward.share
    return Term(
        **{
            **fields,
            "signal": term.reward.by_itself,
            "correction": correction,
            "coefficient": coefficient,
        }
    )


def _with_answers(term: Term, left_to_teacher: set[str]) -> Term:
    """Return a reward's term, about all answers where those that its filter leaves out were for a teacher to mend."""
    if term.signal.outcome is not None and OTHER_ANSWERS.get(term.filter) in left_to_teacher:
        return term.model_copy(update={"filter": "all"})
    return term


class _Moved:
    """Where the numbers of a recipe are in its control."""

    def __init__(self, recipe: Recipe, places: Mapping[int, Term], writes_alone: bool) -> None:
        self._before = recipe.objective.losses
        self._places = places
        self._writes_alone = writes_alone

    def taken_over(self, by_path: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is set at the paths of numbers, by their paths in the control; those that are gone are left out."""
        kept: dict[str, Any] = {}
        for path, value in by_path.items():
            place = self._path(path)
            if place in kept:
                raise RecipeError(
                    f"{path}: with the teacher off it multiplies another number that changes too; give one of them a fixed one"
                )
            if place is not None:
                kept[place] = value
        return kept

    def _path(self, path: str) -> str | None:
        match path.split("."):
            case ["rollout", "source", *_] if self._writes_alone:
                return None
            case ["objective", "losses", number, *rest]:
                return self._in_term(int(number), rest, path)
        return path

    def _in_term(self, number: int, rest: Sequence[str], path: str) -> str | None:
        """Return the path of a term's number: that of a reward's share is the coefficient of the term that is left."""
        if number not in self._places:
            return None
        before, now = self._before[number], self._places[number]
        new = f"objective.losses.{list(self._places).index(number)}"
        if before.signal == now.signal:
            return ".".join([new, *rest])
        factors = {
            ("coefficient",): before.reward.share,
            ("reward", "coefficient"): before.coefficient,
        }
        if tuple(rest) in factors:
            if factors[tuple(rest)] != 1.0:
                raise RecipeError(
                    f"{path}: with the teacher off it is multiplied by {factors[tuple(rest)]:g}; write 1 there"
                )
            return f"{new}.coefficient"
        stays = rest[0] in TAKEN_OVER and dict(now)[rest[0]] == dict(before)[rest[0]]
        return ".".join([new, *rest]) if stays else None


def _is_at(data: Mapping[str, Any], path: str) -> bool:
    """Return whether the control has a number at the path."""
    try:
        number_at(data, path)
    except (KeyError, IndexError, TypeError, ValueError):
        return False
    return True
