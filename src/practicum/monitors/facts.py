"""Read from a resolved recipe the facts that the monitors' rules depend on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from practicum.core.plugins import read_plugin
from practicum.functional.weights import WEIGHTS
from practicum.objective import VERIFIER, Objective
from practicum.ports import walk


@dataclass(frozen=True, slots=True)
class RecipeFacts:
    """The facts about a recipe that decide which rules apply and how.

    `refresh_period` is the number of steps between copies of a `periodic` self-teacher. A recipe
    `has_token_weights` if a term has weights that may drop tokens, and `has_rewards` if a term learns
    from rewards. `teaching_scorers` are the scorers, except the verifier, that a term learns
    from. The teacher `repeats_scores` if all tokens of a correct answer may have the same score.
    """

    max_new_tokens: int = 256
    updates_per_step: int = 1
    refresh_period: int | None = None
    needs_teacher: bool = True
    has_token_weights: bool = False
    has_rewards: bool = False
    teaching_scorers: tuple[str, ...] = ()
    repeats_scores: bool = False

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> "RecipeFacts":
        """Read the facts from the data of a resolved recipe."""
        objective = Objective.model_validate(recipe["objective"])
        terms = objective.losses
        first = next(iter(objective.split_by(lambda term: term.view).values())).losses
        teacher = read_plugin("teachers", recipe["teacher"])
        periods = (
            student.period
            for student in find_self_teachers(recipe).values()
            if student.weights == "periodic"
        )
        return cls(
            max_new_tokens=recipe["rollout"]["max_new_tokens"],
            updates_per_step=recipe["train"]["updates_per_step"],
            refresh_period=next(periods, None),
            needs_teacher=any(term.needs_signal for term in first),
            has_token_weights=any(WEIGHTS[term.weights.name].drops for term in terms),
            has_rewards=any(term.has_rewarded_advantage for term in terms),
            teaching_scorers=tuple(
                dict.fromkeys(term.scorer for term in terms if term.scorer != VERIFIER)
            ),
            repeats_scores=teacher.capabilities().repeats_scores,
        )


def find_self_teachers(recipe: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the settings of a recipe's self-teachers by their keys, which begin with `teacher`."""
    teacher = read_plugin("teachers", recipe["teacher"])
    return {("teacher", *keys): inside for keys, inside in walk(teacher) if inside.name == "self"}


def get_choice_name(choice: Any) -> str:
    """Return the name of a choice that is a mapping, a call such as `teacher(...)`, or None."""
    if isinstance(choice, Mapping):
        return str(choice.get("type", choice.get("name")))
    return "none" if choice is None else str(choice).partition("(")[0]
