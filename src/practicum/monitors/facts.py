"""What monitors know of the recipe, read from its resolved data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from practicum.core.plugins import read_plugin
from practicum.objective import Objective
from practicum.ports import walk


@dataclass(frozen=True, slots=True)
class RecipeFacts:
    """How long answers may be, how many updates a step has, and which kinds of trouble the recipe can get into.

    `refresh` is the number of steps between copies of a `periodic` self-teacher; `selects` is whether a term weighs its tokens;
    `rewarded` is whether a reward is learned from.
    """

    longest: int = 256
    updates: int = 1
    refresh: int | None = None
    asks_teacher: bool = True
    selects: bool = False
    rewarded: bool = False

    @classmethod
    def of(cls, recipe: Mapping[str, Any]) -> "RecipeFacts":
        """Those of a resolved recipe's data."""
        terms = Objective.model_validate(recipe["objective"]).losses
        periods = [
            teacher.period
            for teacher in find_self_teachers(recipe).values()
            if teacher.weights == "periodic"
        ]
        return cls(
            longest=recipe["rollout"]["max_new_tokens"],
            updates=recipe["train"]["updates_per_step"],
            refresh=next(iter(periods), None),
            asks_teacher=any(term.asks for term in terms),
            selects=any(term.weights.name != "all" for term in terms),
            rewarded=any(term.has_rewarded_advantage for term in terms),
        )


def find_self_teachers(recipe: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Return the settings of the self-teachers of a resolved recipe, by the keys that lead to them from `teacher` on."""
    teacher = read_plugin("teachers", recipe["teacher"])
    return {("teacher", *keys): inside for keys, inside in walk(teacher) if inside.type == "self"}


def name_of(choice: Any) -> str:
    """The name of a choice, whichever way it is written."""
    if isinstance(choice, Mapping):
        return str(choice.get("type", choice.get("name")))
    return "none" if choice is None else str(choice).partition("(")[0]
