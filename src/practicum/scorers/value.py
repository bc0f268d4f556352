"""A critic: the expected reward at each token and the resulting advantages (PPO, 1707.06347).

A judgement has one advantage per token, by GAE (1506.02438) over the tokens that the student wrote;
the last of these tokens gets the reward. The critic learns the returns, advantage plus value. With
`body: student` it is a linear output on the student's body, and its loss also trains the body.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from practicum.errors import RecipeError
from practicum.functional import generalized_advantages, group_normalize
from practicum.judging.learned import LearnedConfig, LearnedScorer
from practicum.objective import VERIFIER
from practicum.ports import ScalarModel
from practicum.ports.scoring import Scorer, ScorerContext
from practicum.types import Judgement, Metrics, Rollout, ScoreRequest


class Config(LearnedConfig):
    """The settings of a critic."""

    type: Literal["value"] = "value"
    reward: str = Field(
        default=VERIFIER,
        description="source of the reward to predict: `verifier`, or a scorer listed before this one",
    )
    gamma: float = Field(
        default=1.0, ge=0, le=1, description="discount of later rewards, per token"
    )
    gae_lambda: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="GAE's lambda; 1: reward minus value, 0: the next value minus this one",
    )

    normalize: bool = Field(
        default=False,
        description="normalize the advantages over all tokens of a step to mean 0 and standard "
        "deviation 1",
    )
    clip: float | None = Field(
        default=None,
        gt=0,
        description="clip range of a value's change within a step, as in PPO; none: no limit",
    )

    body: Literal["own", "student"] = Field(
        default="own",
        description="`own`: a separate model; `student`: one output on the student's body; the loss "
        "is part of each update of the student; `learning_rate` is then the output's",
    )
    coefficient: float = Field(
        default=1.0,
        ge=0,
        description="with `body: student`, coefficient of the critic's loss in the student's update: "
        "half the mean squared distance to the returns",
    )

    @model_validator(mode="after")
    def _check_body(self) -> "Config":
        set_keys = {
            "model": self.model is not None,
            "begin": self.begin is not None,
            "updates": self.updates != 1,
        }
        chosen = [name for name, is_set in set_keys.items() if is_set]
        if self.body == "student" and chosen:
            raise ValueError(
                f"body: student has the student's weights and updates; leave out {', '.join(chosen)}, "
                "or set body: own"
            )
        if self.body == "own" and self.coefficient != 1.0:
            raise ValueError("coefficient needs body: student; a separate body has learning_rate")
        return self

    @property
    def loads_scalar(self) -> bool:
        """True if the critic has a body of its own."""
        return self.body == "own"

    @property
    def reads_verifier(self) -> bool:
        """True if the critic learns to predict the verifier's reward."""
        return self.reward == VERIFIER


class ValueScorer(LearnedScorer):
    """A critic, see the module documentation.

    The value of a judgement is the expected reward after the prompt.
    """

    def __init__(self, config: Config, context: ScorerContext) -> None:
        super().__init__(config, context)
        self._config = config
        self._is_shared = config.body == "student"
        self._before: dict[tuple[str, int], Tensor] = {}
        self._first: Metrics = {}

    def open_model(self, config: LearnedConfig, context: ScorerContext) -> ScalarModel:
        """Return an output on a separate body, or on the student's."""
        assert isinstance(config, Config)
        shares = config.body == "student"
        return context.share_student() if shares else super().open_model(config, context)

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """Return the advantages of each answer's tokens; None for an answer without a reward."""
        undecided = [Judgement(None) for _ in rollouts]
        if self.is_warming_up and not self._is_shared:
            return undecided
        values = [
            numbers[rollout.loss_mask]
            for numbers, rollout in zip(
                self._model.predict(list(map(read_text, rollouts))), rollouts, strict=True
            )
        ]
        advantages = {
            row: self._compute_advantages(values[row], reward)
            for row, reward in enumerate(map(self._read_reward, rollouts))
            if reward is not None and len(values[row])
        }
        if self._is_shared:
            # The student's updates move the values, so the values before them are kept.
            self._before |= dict(zip(map(_name, rollouts), values, strict=True))
            if self.is_warming_up:
                return undecided
        if self._config.normalize and advantages:
            advantages = _normalize(advantages)
        return [
            _judge(rollout, values[row], advantages.get(row))
            for row, rollout in enumerate(rollouts)
        ]

    def fit(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Take a step on the distance to the returns, see `compute_distance`.

        `explained` is the share of the returns' variance that the values explain. A critic on the
        student's body has learned in the student's updates, and returns the metrics of the first.
        """
        self.steps += 1
        if not self._is_shared:
            return self._learn(rollouts)
        first, self._first, self._before = self._first, {}, {}
        return first or {"fitted": 0.0}

    def add_gradient(self, rollouts: Sequence[Rollout]) -> None:
        """Add the loss's gradient to the student's body and take a step of the output."""
        if self._is_shared:
            metrics = self._learn(rollouts)
            self._first = self._first or metrics

    def _learn(self, rollouts: Sequence[Rollout]) -> Metrics:
        chosen = [
            (rollout, reward)
            for rollout in rollouts
            if (reward := self._read_reward(rollout)) is not None and rollout.loss_mask.any()
        ]
        if not chosen:
            return {"fitted": 0.0}
        texts = [read_text(rollout) for rollout, _ in chosen]
        masks = [rollout.loss_mask for rollout, _ in chosen]
        if self._is_shared:
            values = [self._before[_name(rollout)] for rollout, _ in chosen]
        else:
            numbers = self._model.predict(texts)
            values = [row[mask] for row, mask in zip(numbers, masks, strict=True)]
        # Fixed before the updates, so that a value does not chase returns that move with it.
        returns = torch.cat(
            [
                self._compute_advantages(row, reward) + row
                for row, (_, reward) in zip(values, chosen, strict=True)
            ]
        )
        supervised = torch.cat(masks)
        before = torch.cat(values)
        errors = before - returns
        spread = returns.var(unbiased=False)
        coefficient, clip = self._config.coefficient, self._config.clip
        metrics = self.descend(
            texts,
            lambda numbers: (
                coefficient * compute_distance(numbers[supervised], before, returns, clip)
            ),
        )
        explained = 1.0 - errors.var(unbiased=False) / spread if spread > 0 else torch.zeros(())
        return {"fitted": float(len(chosen)), "explained": explained.item(), **metrics}

    def _compute_advantages(self, values: Tensor, reward: float) -> Tensor:
        # The verifier rewards complete answers, so only the last token has a reward.
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


def compute_distance(
    values: Float[Tensor, " T"],
    before: Float[Tensor, " T"],
    returns: Float[Tensor, " T"],
    clip: float | None,
) -> Float[Tensor, ""]:
    """Return half the mean squared distance of the values to the returns.

    With `clip`, each value is also clipped to within `clip` of its value before the step, and the
    larger of the two squared distances counts, as in PPO's code.
    """
    distances = (values - returns).square()
    if clip is not None:
        limited = before + (values - before).clamp(-clip, clip)
        distances = torch.maximum(distances, (limited - returns).square())
    return 0.5 * distances.mean()


def _normalize(advantages: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Normalize the advantages over the tokens of all rows."""
    numbers = torch.tensor(group_normalize(torch.cat(list(advantages.values())).tolist()))
    parts = numbers.split([len(row) for row in advantages.values()])
    return dict(zip(advantages, parts, strict=True))


def _judge(rollout: Rollout, values: Tensor, advantages: Tensor | None) -> Judgement:
    if advantages is None:
        return Judgement(None)
    tokens = torch.zeros(len(rollout.tokens))
    tokens[rollout.loss_mask] = advantages
    return Judgement(values[0].item(), tokens)


def _name(rollout: Rollout) -> tuple[str, int]:
    return rollout.prompt.id, rollout.sample


def read_text(rollout: Rollout) -> ScoreRequest:
    """Return a request for one number before each of the rollout's tokens."""
    return ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist()))


def build(config: Config, context: ScorerContext) -> Scorer:
    """Load the model; its initial values are 0, so the first advantages equal the reward."""
    names = (VERIFIER, *context.earlier)
    if config.reward not in names:
        raise RecipeError(
            f"scorers.{context.name}.reward: no scorer {config.reward!r} is listed before this one; "
            f"set {' or '.join(names)}"
        )
    return ValueScorer(config, context)
