"""Provide a scorer with a fault: its score only grows with the length of an answer."""

from collections.abc import Sequence
from typing import Literal

from practicum.ports.scoring import Scorer, ScorerContext, ScorerSettings
from practicum.types import Judgement, Rollout


class Config(ScorerSettings):
    """The number of tokens that it finds perfect."""

    type: Literal["benchmarks.bent_scorer"] = "benchmarks.bent_scorer"
    longest: int = 8

    @property
    def follows_student(self) -> bool:
        """False: the judgement depends only on the answer."""
        return False


class LengthScorer(Scorer):
    """See `practicum.ports.scoring.Scorer`."""

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """Return each answer's length as a share of the longest."""
        return [Judgement(min(len(rollout.tokens) / self._longest, 1.0)) for rollout in rollouts]


def build(config: Config, context: ScorerContext) -> Scorer:
    """Build the scorer; it asks nothing of the run."""
    return LengthScorer(config.longest)
