"""What monitors know of the recipe, read from its resolved data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Facts:
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
    def of(cls, recipe: Mapping[str, Any]) -> "Facts":
        """Those of a resolved recipe's data."""
        terms = recipe["objective"]["losses"]
        signals = [name_of(term["signal"]) for term in terms]
        return cls(
            longest=recipe["rollout"]["max_new_tokens"],
            updates=recipe["train"]["updates_per_step"],
            refresh=next((held["period"] for held in selves(recipe["teacher"]) if held["weights"] == "periodic"), None),
            asks_teacher=not all(signal in ("text", "score") for signal in signals),
            selects=any(name_of(term["weights"]) != "all" for term in terms),
            rewarded="score" in signals or any(name_of(term["reward"]) != "none" for term in terms),
        )


def selves(teacher: Any) -> Iterator[Mapping[str, Any]]:
    """The self-teachers within a teacher's data."""
    if isinstance(teacher, Mapping):
        if teacher.get("type") == "self":
            yield teacher
        for inner in teacher.values():
            yield from selves(inner)
    elif isinstance(teacher, list):
        for inner in teacher:
            yield from selves(inner)


def name_of(choice: Any) -> str:
    """The name of a choice, whichever way it is written."""
    if isinstance(choice, Mapping):
        return str(choice.get("type", choice.get("name")))
    return "none" if choice is None else str(choice).partition("(")[0]
