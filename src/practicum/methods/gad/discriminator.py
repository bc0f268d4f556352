"""A discriminator that learns to distinguish teacher answers from student answers (GAD, 2511.10643).

The Bradley-Terry loss `-log sigmoid(D(teacher) - D(student))` raises the logit of the teacher's
answer above the logit of the student's answer to the same prompt. The discriminator learns together
with the student, from the answers of each step. At its optimum D is log T(y|x) - log S(y|x) plus a
constant per prompt. The raw D as a reward, without normalization by a group, therefore has the
gradient of the sequence-level reverse KL: see docs/scorers.md.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Literal

import torch
from pydantic import Field

from practicum.judging.learned import LearnedConfig, LearnedScorer, end_text
from practicum.models.tensors import SavedTensor
from practicum.ports.scoring import Scorer, ScorerContext
from practicum.types import Judgement, Metrics, Rollout

REAL = ("teacher", "dataset")
"""The writers with answers that should score above the student's answers."""

NEWEST = 10
"""The newest steps with pairs, over which the accuracy is averaged."""


class Config(LearnedConfig):
    """The settings of a discriminator."""

    type: Literal["discriminator"] = "discriminator"
    least_accuracy: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="mean share of new pairs in the correct order over ten steps below which it returns no "
        "judgements; chance is 0.5",
    )

    @property
    def imitates_teacher(self) -> bool:
        """True: it prefers the teacher's answers to the student's."""
        return True


class Discriminator(LearnedScorer):
    """A discriminator, see the module documentation; a judgement is a logit up to a constant."""

    def __init__(self, config: Config, context: ScorerContext) -> None:
        self._least_accuracy = config.least_accuracy
        self._accuracies: deque[float] = deque(maxlen=NEWEST)
        super().__init__(config, context)

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """Return the logit of each answer; None during the warm-up and below the least accuracy."""
        accuracy = fmean(self._accuracies) if self._accuracies else 0.0
        # Use None, not 0: an answer without a value has no effect under any kind of advantage.
        if self.is_warming_up or accuracy < self._least_accuracy:
            return [Judgement(None) for _ in rollouts]
        return [Judgement(value) for value in self.predict_ends(rollouts).tolist()]

    def fit(self, rollouts: Sequence[Rollout]) -> Metrics:
        """Take a step on all pairs of a teacher answer and a student answer to the same prompt.

        `accuracy` is the share of pairs in the correct order, with ties as half; `unpaired` counts the prompts without
        a pair. Pairs of equal answers have no gradient and are left out.
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
        # Use the margins before the first update, which was not fitted to these pairs yet.
        ordered = (margins[0] > 0).double() + 0.5 * (margins[0] == 0).double()
        self._accuracies.append(ordered.mean().item())
        return {
            "pairs": float(len(pairs)),
            "unpaired": float(unpaired),
            "accuracy": self._accuracies[-1],
            **metrics,
        }

    def save_state(self) -> Mapping[str, SavedTensor]:
        """Return the state of the learned scorer, and the accuracies of the newest steps."""
        accuracies = torch.tensor(list(self._accuracies), dtype=torch.float64)
        return {**super().save_state(), "accuracies": accuracies}

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore the state that `save_state` returned."""
        if tensors:
            weights = dict(tensors)
            self._accuracies = deque(weights.pop("accuracies").tolist(), maxlen=NEWEST)
            super().load_state(weights)


def find_source_pairs(rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, int]:
    """Return the row pairs (teacher, student) of each prompt, and the number of unpaired prompts.

    Equal answers and answers of the reference are in no pair.
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
        if not torch.equal(rollouts[teacher].tokens, rollouts[student].tokens)
    ]
    unpaired = sum(not (real and sampled) for real, sampled in groups.values())
    return torch.tensor(pairs, dtype=torch.long).reshape(-1, 2), unpaired


def build(config: Config, context: ScorerContext) -> Scorer:
    """Load the model; before the first update all judgements are 0."""
    return Discriminator(config, context)
