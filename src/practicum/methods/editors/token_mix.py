"""Sample each token from a mixture of student and teacher."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from practicum.methods.editors.together import JointSource
from practicum.ports import MixedRequest, MixtureRule, TokenRule
from practicum.rollouts.source import SourceParts
from practicum.types import Metrics, Rollout


class Config(JointSource):
    """Tokens sampled from `teacher * T + (1 - teacher) * S` in lockstep (MiniLLM 2306.08543)."""

    type: Literal["token_mix"] = "token_mix"
    teacher: float = Field(default=0.2, ge=0, le=1)

    def build_rule(self, requests: Sequence[MixedRequest], parts: SourceParts) -> TokenRule:
        """Return the mixture; its tokens have no single author."""
        return MixtureRule(self.teacher)

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return nothing: no token of a mixture has an author."""
        return {}
