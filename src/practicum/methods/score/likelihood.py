"""Score an answer by the teacher's mean log-probability of the student's tokens.

With `below` the scorer rejects instead: an answer from the first token with a lower probability, or
a conversation from the turn that contains this token. A model can thus find the student's first
wrong turn by reading the conversation, without the task's expert (SCoRe 2509.14257).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from practicum.core.plugins import Plugin
from practicum.errors import CapabilityError
from practicum.losses import read_tokens
from practicum.objective import Sampled
from practicum.ports import Teacher, TeacherConfig
from practicum.ports.scoring import (
    Scorer,
    ScorerContext,
    ScorerSettings,
)
from practicum.types import Judgement, Rollout


class Config(ScorerSettings):
    """The teacher that scores, and its threshold for rejection."""

    type: Literal["likelihood"] = "likelihood"
    teacher: Plugin("teachers", TeacherConfig) = Field(  # type: ignore[valid-type]
        description="the teacher, which gives log-probabilities of the student's tokens"
    )
    below: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="reject an answer with a token below this probability; accepted answers have "
        "the verifier's reward, rejected answers have none; none: the log-probability is the reward",
    )

    @property
    def follows_student(self) -> bool:
        """True if the teacher uses the student's weights."""
        return self.teacher.capabilities().follows_student

    @property
    def reads_verifier(self) -> bool:
        """True if it only rejects, and the student learns from the verifier's reward."""
        return self.below is not None

    @property
    def rejects(self) -> bool:
        """True if it can reject an answer."""
        return self.below is not None


@dataclass(frozen=True, slots=True)
class Likelihood(Scorer):
    """A likelihood scorer, see the module documentation.

    An answer has no judgement if it has no tokens or the teacher returns no signal for it.
    """

    config: Config
    teacher: Teacher

    def score(self, rollouts: Sequence[Rollout]) -> list[Judgement]:
        """Return the mean log-probability of each answer, or with `below` the accepted rewards."""
        return [
            self._judge(rollout, logprobs)
            for rollout, logprobs in zip(rollouts, self._read(rollouts), strict=True)
        ]

    def count_accepted(self, rollouts: Sequence[Rollout]) -> list[int | None]:
        """Return the number of tokens before the first rejected token or turn of each answer."""
        return [
            None if logprobs is None else self._find_rejected(rollout, logprobs)
            for rollout, logprobs in zip(rollouts, self._read(rollouts), strict=True)
        ]

    def _read(self, rollouts: Sequence[Rollout]) -> list[Tensor | None]:
        """Return the teacher's log-probability of each token, 0 at tokens without a loss."""
        if not rollouts:
            return []
        signals = self.teacher.score(rollouts, Sampled())
        columns = [read_tokens(signal, slice(None)).logprobs for signal in signals]
        return [
            None if column is None else torch.where(rollout.loss_mask, column.cpu(), 0.0)
            for rollout, column in zip(rollouts, columns, strict=True)
        ]

    def _judge(self, rollout: Rollout, logprobs: Tensor | None) -> Judgement:
        if logprobs is None or not rollout.loss_mask.any():
            return Judgement(None)
        if self.config.below is None:
            return Judgement((logprobs.sum() / rollout.loss_mask.sum()).item())
        is_rejected = self._find_rejected(rollout, logprobs) is not None
        return Judgement(None if is_rejected else rollout.reward)

    def _find_rejected(self, rollout: Rollout, logprobs: Tensor) -> int | None:
        assert self.config.below is not None, "sources refuse a scorer that cannot reject"
        doubted = (logprobs < math.log(self.config.below)).nonzero()
        if not len(doubted):
            return None
        place, start = int(doubted[0]), 0
        for turn in rollout.turns:
            # A turn is a single action, so it is rejected from its beginning.
            if place < start + turn.tokens:
                return start
            start += turn.tokens
        return place


def build(config: Config, context: ScorerContext) -> Scorer:
    """Build the scorer; CapabilityError if its teacher returns no log-probabilities."""
    if "sampled" not in config.teacher.capabilities().signals:
        raise CapabilityError(
            f"scorers.{context.name}.teacher: {config.teacher.type!r} gives no log-probabilities of "
            "the student's tokens; use a teacher that does, such as {type: model, model: ...}, or "
            "use a scorer of type: judge"
        )
    return Likelihood(config, context.build_teacher(config.teacher))
