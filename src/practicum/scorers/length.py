"""The verifier's reward, less a penalty for each token of the answer beyond a limit.

A limit and a longest answer per effort make the efforts of thinking of DeepSeek-V4 (section 5.1.1). The
report prints no formula. Here each token costs a share of the reward. A wrong answer has no
penalty, so that a student without rewards does not learn to say nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from practicum.ports.scoring import Scorer, ScorerContext, ScorerSettings
from practicum.types import Judgement, Rollout


class Config(ScorerSettings):
    """The limit, and the penalty beyond it."""

    type: Literal["length"] = "length"
    limit: int = Field(default=0, ge=0, description="tokens of the student without a penalty")
    penalty: float = Field(
        default=0.1,
        gt=0,
        description="share of the reward that each further token costs, up to all",
    )

    @property
    def follows_student(self) -> bool:
        """False: a length has the same penalty at every step."""
        return False

    @property
    def reads_verifier(self) -> bool:
        """True: the penalty is taken from the verifier's reward."""
        return True


@dataclass(frozen=True, slots=True)
class LengthPenalty(Scorer):
    """The scorer, see the module documentation; an answer without a reward has no judgement."""

    config: Config

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """Return the reward of each answer after its penalty; turns of others cost nothing."""
        return [Judgement(self._reduce(rollout)) for rollout in rollouts]

    def _reduce(self, rollout: Rollout) -> float | None:
        excess = max(int(rollout.loss_mask.sum()) - self.config.limit, 0)
        share = max(1 - self.config.penalty * excess, 0.0)
        return None if rollout.reward is None else rollout.reward * share


def build(config: Config, context: ScorerContext) -> Scorer:
    """Build the scorer."""
    return LengthPenalty(config)
