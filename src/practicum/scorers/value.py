"""A critic: the reward that it expects at each token, and the advantages that follow (PPO, 1707.06347).

A judgement has one advantage a token, by GAE (1506.02438) over the tokens that the student wrote;
the reward comes with the last of them. The critic learns the returns, advantage plus value.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from practicum.errors import RecipeError
from practicum.functional import generalized_advantages
from practicum.objective import VERIFIER
from practicum.ports.scoring import Scorer, ScorerContext
from practicum.scorers._learned import LearnedConfig, LearnedScorer
from practicum.types import Judgement, Metrics, Rollout, ScoreRequest


class Config(LearnedConfig):
    """The settings of a critic."""

    type: Literal["value"] = "value"
    reward: str = Field(
        default=VERIFIER,
        description="whose reward it learns to expect: `verifier`, or a scorer named before it",
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount of later rewards, a token")
    gae_lambda: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="GAE's lambda; 1: reward minus value, 0: the next value minus this one",
    )

    @property
    def reads_verifier(self) -> bool:
        """True if it learns to expect the verifier's reward."""
        return self.reward == VERIFIER


class ValueScorer(LearnedScorer):
    """See the module; the value of a judgement is the reward expected after the prompt."""

    def __init__(self, config: Config, context: ScorerContext) -> None:
        super().__init__(config, context)
        self._config = config

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """Return the advantages of each answer's tokens; None where there is no reward."""
        if self.is_warming_up:
            return [Judgement(None) for _ in rollouts]
        values = self._model.predict(list(map(read_text, rollouts)))
        return [
            self._judge(rollout, numbers) for rollout, numbers in zip(rollouts, values, strict=True)
        ]

    def _judge(self, rollout: Rollout, numbers: Float[Tensor, " T"]) -> Judgement:
        reward = self._read_reward(rollout)
        mask = rollout.loss_mask
        if reward is None or not mask.any():
            return Judgement(None)
        tokens = torch.zeros(len(rollout.tokens))
        tokens[mask] = self._compute_advantages(numbers[mask], reward)
        return Judgement(numbers[mask][0].item(), tokens)

    def fit(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Take a step on half the mean squared distance to the returns.

        `explained` is the share of the returns' variance that the values explain.
        """
        self.steps += 1
        chosen = [
            (rollout, reward)
            for rollout in rollouts
            if (reward := self._read_reward(rollout)) is not None and rollout.loss_mask.any()
        ]
        if not chosen:
            return {"fitted": 0.0}
        texts = [read_text(rollout) for rollout, _ in chosen]
        masks = [rollout.loss_mask for rollout, _ in chosen]
        values = [
            numbers[mask] for numbers, mask in zip(self._model.predict(texts), masks, strict=True)
        ]
        # Fixed before the updates, so that a value does not chase returns that move with it.
        returns = torch.cat(
            [
                self._compute_advantages(row, reward) + row
                for row, (_, reward) in zip(values, chosen, strict=True)
            ]
        )
        supervised = torch.cat(masks)
        errors = torch.cat(values) - returns
        spread = returns.var(unbiased=False)
        metrics = self.descend(
            texts, lambda numbers: 0.5 * (numbers[supervised] - returns).square().mean()
        )
        explained = 1.0 - errors.var(unbiased=False) / spread if spread > 0 else torch.zeros(())
        return {"fitted": float(len(chosen)), "explained": explained.item(), **metrics}

    def _compute_advantages(self, values: Tensor, reward: float) -> Tensor:
        # The verifier sees whole answers, so the last token alone earns something.
        rewards = torch.zeros_like(values)
        rewards[-1] = reward
        return generalized_advantages(
            rewards, values, self._config.gamma, self._config.gae_lambda
        ).to(values)

    def _read_reward(self, rollout: Rollout) -> float | None:
        if self._config.reward == VERIFIER:
            return rollout.reward
        judgement = rollout.judgements.get(self._config.reward)
        return None if judgement is None else judgement.value


def read_text(rollout: Rollout) -> ScoreRequest:
    """Return the text with one number before each of the rollout's tokens."""
    return ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist()))


def build(config: Config, context: ScorerContext) -> Scorer:
    """Load the model, whose first values are all 0: the first advantages are the reward."""
    names = (VERIFIER, *context.earlier)
    if config.reward not in names:
        raise RecipeError(
            f"scorers.{context.name}.reward: no scorer {config.reward!r} comes before it; write "
            f"{' or '.join(names)}"
        )
    return ValueScorer(config, context)
