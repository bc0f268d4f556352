"""A process preference model, which ranks the steps of an answer (rStar-Math, 2501.04519).

It learns from the trees of a search. Among the steps that follow the same beginning, the step with
the highest mean reward should score above the step with the lowest mean reward, by the loss
`-log sigmoid(s(high) - s(low))`. The mean reward itself is too noisy to be fitted. The model's scores
never order the steps, so that a model that guides a search does not learn from its own scores. A
judgement has one score per step, from 0 to 1: the sigmoid of the prediction after the step.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from practicum.judging.learned import LearnedConfig, LearnedScorer
from practicum.ports.scoring import Scorer, ScorerContext
from practicum.rollouts.tree import find_step_ends
from practicum.types import Judgement, Metrics, Rollout, ScoreRequest


class Config(LearnedConfig):
    """The settings of a process preference model."""

    type: Literal["process"] = "process"
    step: Literal["line", "paragraph", "word"] = Field(
        default="line", description="end of a step of answers that no search wrote"
    )


class ProcessScorer(LearnedScorer):
    """See the module; the judgement of an answer is the score of its last step."""

    def __init__(self, config: Config, context: ScorerContext) -> None:
        super().__init__(config, context)
        self._step = config.step
        self._decode_token = context.renderer.decode_token

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """Return the score of each step at each of its tokens."""
        texts = [
            ScoreRequest(rollout.prompt_tokens, (*rollout.tokens.tolist(), 0))
            for rollout in rollouts
        ]
        numbers = self._model.predict(texts)
        return [
            self._judge(rollout, row.sigmoid())
            for rollout, row in zip(rollouts, numbers, strict=True)
        ]

    def _judge(self, rollout: Rollout, states: Tensor) -> Judgement:
        """Return the judgement from the scores of the states before each token and at the end."""
        ends = list_step_ends(rollout)
        if sum(step.tokens for step in rollout.steps) < len(rollout.tokens):
            begin = ends[-1] if ends else 0
            tokens = rollout.tokens[begin:].tolist()
            more = find_step_ends(tokens, self._decode_token, self._step)
            ends = [*ends, *(begin + end for end in more)]
        lengths = torch.tensor([end - start for start, end in zip([0, *ends], ends, strict=False)])
        scores = states[torch.tensor(ends, dtype=torch.long)]
        return Judgement(
            states[-1].item(), scores.repeat_interleave(lengths) if ends else states[:0]
        )

    def fit(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Take a step on all pairs of a best and a worst step after the same beginning.

        `accuracy` is the share of pairs in the correct order, with ties as half.
        """
        self.steps += 1
        pairs = find_step_pairs(rollouts)
        if not pairs:
            return {"pairs": 0.0}
        margins: list[Tensor] = []

        def compute_loss(numbers: Tensor) -> Tensor:
            best, worst = numbers.view(-1, 2).unbind(dim=1)
            margins.append((best - worst).detach())
            return -torch.nn.functional.logsigmoid(best - worst).mean()

        metrics = self.descend([text for pair in pairs for text in pair], compute_loss)
        ordered = (margins[0] > 0).double() + 0.5 * (margins[0] == 0).double()
        return {"pairs": float(len(pairs)), "accuracy": ordered.mean().item(), **metrics}


def list_step_ends(rollout: Rollout) -> list[int]:
    """Return the token positions at which the searched steps of an answer end."""
    return list(accumulate(step.tokens for step in rollout.steps))


def find_step_pairs(rollouts: Sequence[Rollout]) -> list[tuple[ScoreRequest, ScoreRequest]]:
    """Return the texts up to the best and to the worst step after each beginning.

    Steps are ordered by their mean reward. A beginning has no pair if all its steps have the same mean
    reward, or none. Among equal steps, the first sampled step counts.
    """
    siblings: dict[tuple[str, str], dict[str, tuple[float, ScoreRequest]]] = {}
    for rollout in rollouts:
        tokens = rollout.tokens.tolist()
        for step, end in zip(rollout.steps, list_step_ends(rollout), strict=True):
            if step.reward is None:
                continue
            parent = step.node.rpartition(".")[0]
            text = ScoreRequest((*rollout.prompt_tokens, *tokens[:end]), (0,))
            group = siblings.setdefault((rollout.prompt.id, parent), {})
            group.setdefault(step.node, (step.reward, text))
    pairs = []
    for group in siblings.values():
        best = max(group.values(), key=lambda pair: pair[0])
        worst = min(group.values(), key=lambda pair: pair[0])
        if best[0] > worst[0]:
            pairs.append((best[1], worst[1]))
    return pairs


def build(config: Config, context: ScorerContext) -> Scorer:
    """Load the model; before the first update all judgements are 0.5."""
    return ProcessScorer(config, context)
