"""A scorer that is a Python object: a function `(prompt, answer) -> float`, or a `Scorer`."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from practicum.foreign import name_object, takes_arguments
from practicum.ports.gate import accept_number, call_foreign, collect_rejections, list_kinds
from practicum.ports.given._config import GivenConfig
from practicum.ports.scoring import (
    Scorer,
    ScorerContext,
    ScorerSettings,
)
from practicum.prompts import Prompt
from practicum.types import Judgement, Rollout

SIGNATURE = "def score(prompt: Prompt, answer: str) -> float"


class Config(ScorerSettings, GivenConfig):
    """The settings of a scorer that is an object."""

    role: ClassVar[str] = "scorers"
    accepted: ClassVar[str] = (
        f"a mapping, a function {SIGNATURE}, or a practicum.ports.scoring.Scorer"
    )
    type: Literal["practicum.ports.given.scorer"] = "practicum.ports.given.scorer"

    @classmethod
    def accepts(cls, entry: Any) -> bool:
        """Return True if an object is a scorer, or can be called with a prompt and an answer."""
        return not isinstance(entry, type) and (
            isinstance(entry, Scorer) or takes_arguments(entry, "prompt", "answer")
        )

    @property
    def follows_student(self) -> bool:
        """False for a function; a `Scorer` may learn."""
        return isinstance(self.object, Scorer)


class FunctionScorer(Scorer):
    """A scorer that calls a function for each answer."""

    def __init__(self, function: Callable[[Prompt, str], Any]) -> None:
        self._function = function
        self._name = name_object(function)

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """Return the function's number for each answer; undecided where it returns none."""
        return [self._judge(rollout) for rollout in rollouts]

    def _judge(self, rollout: Rollout) -> Judgement:
        with collect_rejections() as rejections:
            number = call_foreign(
                self._name, lambda: self._function(rollout.prompt, rollout.answer)
            )
            accepted = None if number is None else accept_number(number, self._name)
        return Judgement(accepted, rejected=list_kinds(rejections))


def build(config: Config, context: ScorerContext) -> Scorer:
    """Return the scorer, or a scorer around the function."""
    entry = config.load()
    return entry if isinstance(entry, Scorer) else FunctionScorer(entry)
