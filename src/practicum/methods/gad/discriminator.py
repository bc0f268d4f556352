"""A discriminator: it learns to tell the teacher's answers from the student's (GAD, 2511.10643).

Bradley-Terry: the logit of the teacher's answer is to exceed that of the student's answer to the
same prompt, by `-log sigmoid(D(teacher) - D(student))`. It learns beside the student from each
step's own answers. At its optimum D is log T(y|x) - log S(y|x) and a constant of the prompt, so
the raw D as a reward, without a group's division, has the gradient of the reverse KL of whole
answers: see docs/scorers.md.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from practicum.judging.learned import LearnedConfig, LearnedScorer, end_text
from practicum.ports.scoring import Scorer, ScorerContext
from practicum.types import Judgement, Metrics, Rollout

REAL = ("teacher", "dataset")
"""The writers whose answers are to score above the student's."""


class Config(LearnedConfig):
    """The settings of a discriminator."""

    type: Literal["discriminator"] = "discriminator"

    @property
    def imitates_teacher(self) -> bool:
        """True: it prefers the teacher's answers to the student's."""
        return True


class Discriminator(LearnedScorer):
    """See the module; a judgement is a logit, whose level means nothing."""

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """Return the logit of each answer; None during the warm-up."""
        # No value rather than 0: an answer without one teaches nothing, whatever the advantage.
        if self.is_warming_up:
            return [Judgement(None) for _ in rollouts]
        return [Judgement(value) for value in self.predict_ends(rollouts).tolist()]

    def fit(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Take a step on all pairs of a teacher's and the student's answer to one prompt.

        `accuracy` is the share of pairs that it orders rightly, ties as half; `unpaired` counts the
        prompts without a pair.
        """
        self.steps += 1
        pairs, unpaired = find_source_pairs(rollouts)
        if not len(pairs):
            return {"pairs": 0.0, "unpaired": float(unpaired)}
        margins: list[torch.Tensor] = []

        def compute_loss(logits: torch.Tensor) -> torch.Tensor:
            real, sampled = logits[pairs].unbind(dim=1)
            margins.append((real - sampled).detach())
            return -torch.nn.functional.logsigmoid(real - sampled).mean()

        metrics = self.descend(list(map(end_text, rollouts)), compute_loss)
        # The margins before the first update: those of judgements that nothing was fitted to yet.
        ordered = (margins[0] > 0).double() + 0.5 * (margins[0] == 0).double()
        return {
            "pairs": float(len(pairs)),
            "unpaired": float(unpaired),
            "accuracy": ordered.mean().item(),
            **metrics,
        }


def find_source_pairs(rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, int]:
    """Return the rows (teacher's, student's) of all pairs of a prompt, and the prompts without.

    The reference is neither: its answers are in no pair.
    """
    groups: dict[str, tuple[list[int], list[int]]] = {}
    for row, rollout in enumerate(rollouts):
        real, sampled = groups.setdefault(rollout.prompt.id, ([], []))
        if rollout.source != "reference":
            (real if rollout.source in REAL else sampled).append(row)
    pairs = [
        (teacher, student)
        for real, sampled in groups.values()
        for teacher in real
        for student in sampled
    ]
    unpaired = sum(not (real and sampled) for real, sampled in groups.values())
    return torch.tensor(pairs, dtype=torch.long).reshape(-1, 2), unpaired


def build(config: Config, context: ScorerContext) -> Scorer:
    """Load the model, whose first judgements are all 0."""
    return Discriminator(config, context)
