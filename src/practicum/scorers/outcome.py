"""An outcome reward model: the probability that an answer is correct (Cobbe et al., 2110.14168).

It learns by cross-entropy from the verifier's rewards, using the answers to a fixed share of the
prompts, and judges the answers to all other prompts. The student therefore never learns from a
reward that the model was fitted to.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from practicum.judging.learned import LearnedConfig, LearnedScorer, end_text, is_own
from practicum.ports.scoring import Scorer, ScorerContext
from practicum.types import Judgement, Metrics, Rollout


class Config(LearnedConfig):
    """The settings of an outcome reward model."""

    type: Literal["outcome"] = "outcome"
    share: float = Field(
        default=0.25,
        gt=0,
        lt=1,
        description="share of the prompts to learn from; it judges all other prompts",
    )

    @property
    def reads_verifier(self) -> bool:
        """True: it learns to predict the verifier's reward."""
        return True


class OutcomeScorer(LearnedScorer):
    """An outcome reward model, see the module documentation; a judgement is a probability."""

    def __init__(self, config: Config, context: ScorerContext) -> None:
        super().__init__(config, context)
        self._share = config.share

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """Return the probability that each answer is correct; None for prompts it learns from."""
        if self.is_warming_up:
            return [Judgement(None) for _ in rollouts]
        judged = [rollout for rollout in rollouts if not self._owns(rollout)]
        values = iter(self.predict_ends(judged).sigmoid().tolist())
        return [Judgement(None if self._owns(rollout) else next(values)) for rollout in rollouts]

    def fit(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Take a step on the cross-entropy of the verified answers to the prompts it learns from."""
        self.steps += 1
        fitted = [
            (rollout, rollout.reward)
            for rollout in rollouts
            if self._owns(rollout) and rollout.reward is not None
        ]
        if not fitted:
            return {"fitted": 0.0}
        labels = torch.tensor([reward for _, reward in fitted], dtype=torch.float32).clamp(0.0, 1.0)
        metrics = self.descend(
            [end_text(rollout) for rollout, _ in fitted],
            lambda logits: torch.nn.functional.binary_cross_entropy_with_logits(logits, labels),
        )
        return {"fitted": float(len(fitted)), **metrics}

    def _owns(self, rollout: Rollout) -> bool:
        return is_own(self._seed, self._share, rollout.prompt.id)


def build(config: Config, context: ScorerContext) -> Scorer:
    """Load the model; before the first update all judgements are 0.5."""
    return OutcomeScorer(config, context)
