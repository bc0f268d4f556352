"""A process preference model, which ranks the steps of an answer (rStar-Math, 2501.04519).

It learns from the trees of a search. Among the steps that follow the same beginning, each of the two
with the highest mean rewards should score above each of the two with the lowest, by the loss
`-log sigmoid(s(high) - s(low))`. The same holds for a tree's whole answers, which need not share a
beginning: right ones rank by the mean over their steps, and wrong ones are the low side. The mean
rewards themselves are too noisy to be fitted. The model's scores never order the steps, so that a
model that guides a search does not learn from its own scores. A judgement has one score per step, from
0 to 1: the sigmoid of the prediction after the step.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from practicum.judging.learned import LearnedConfig, LearnedScorer
from practicum.ports.scoring import Scorer, ScorerContext
from practicum.rollouts.tree import find_step_ends
from practicum.types import Judgement, Metrics, Rollout, ScoreRequest

Candidate = tuple[float, float, ScoreRequest]
"""The mean reward of a step or an answer, its rank, and the text up to its end."""

Pair = tuple[ScoreRequest, ScoreRequest]
"""The text up to a better step, and the text up to a worse one."""


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
        """Take a step on the pairs of all groups; each group has the same weight (section 3.3).

        `accuracy` is the share of pairs in the correct order, with ties as half.
        """
        self.steps += 1
        groups = find_step_pairs(rollouts)
        if not groups:
            return {"pairs": 0.0}
        pairs = [pair for group in groups for pair in group]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        places = {text: place for place, text in enumerate(texts)}
        rows = torch.tensor([[places[best], places[worst]] for best, worst in pairs])
        weights = torch.tensor([1 / len(group) / len(groups) for group in groups for _ in group])
        margins: list[Tensor] = []

        def compute_loss(numbers: Tensor) -> Tensor:
            best, worst = numbers[rows].unbind(dim=1)
            margins.append((best - worst).detach())
            return -(weights * torch.nn.functional.logsigmoid(best - worst)).sum()

        metrics = self.descend(texts, compute_loss)
        ordered = (margins[0] > 0).double() + 0.5 * (margins[0] == 0).double()
        return {"pairs": float(len(pairs)), "accuracy": ordered.mean().item(), **metrics}


def list_step_ends(rollout: Rollout) -> list[int]:
    """Return the token positions at which the searched steps of an answer end."""
    return list(accumulate(step.tokens for step in rollout.steps))


def find_step_pairs(rollouts: Sequence[Rollout]) -> list[list[Pair]]:
    """Return the pairs of each beginning's next steps and of each tree's whole answers.

    A pair is the text up to a better step and the text up to a worse one. Steps rank by their mean
    reward, and whole answers by the mean of their steps' mean rewards. Steps without a mean reward
    are in no pair.
    """
    groups: dict[tuple[str, ...], dict[str, Candidate]] = {}
    for rollout in rollouts:
        tokens, end, rewards = rollout.tokens.tolist(), 0, list[float]()
        for step in rollout.steps:
            end += step.tokens
            if step.reward is None:
                continue
            rewards.append(step.reward)
            text = ScoreRequest((*rollout.prompt_tokens, *tokens[:end]), (0,))
            parent, root = step.node.rpartition(".")[0], step.node.partition(".")[0]
            candidates = groups.setdefault((rollout.prompt.id, parent), {})
            candidates.setdefault(step.node, (step.reward, step.reward, text))
            if end == len(tokens) and rollout.stop_reason == "stop":
                candidates = groups.setdefault((rollout.prompt.id, root, "answers"), {})
                mean = sum(rewards) / len(rewards)
                candidates.setdefault(step.node, (step.reward, mean, text))
    pairs = [pair_extremes(list(candidates.values())) for candidates in groups.values()]
    return [group for group in pairs if group]


def pair_extremes(candidates: Sequence[Candidate]) -> list[Pair]:
    """Pair the two of highest rank with the two of lowest rank, where the first have more reward.

    The lowest reward is never the better one, and the highest never the worse one, whatever the
    rank. Among equal ranks, the first sampled candidate counts.
    """
    rewards = [candidate[0] for candidate in candidates]
    right = [candidate for candidate in candidates if candidate[0] > min(rewards)]
    wrong = [candidate for candidate in candidates if candidate[0] < max(rewards)]
    best = sorted(right, key=itemgetter(1), reverse=True)[:2]
    worst = sorted(wrong, key=itemgetter(1))[:2]
    return [(high[2], low[2]) for high in best for low in worst if high[0] > low[0]]


def build(config: Config, context: ScorerContext) -> Scorer:
    """Load the model; before the first update all judgements are 0.5."""
    return ProcessScorer(config, context)
