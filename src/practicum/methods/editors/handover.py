"""One writer at a time: the teacher takes over where the models differ, and hands back where they agree."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import model_validator

from practicum import functional as F
from practicum.methods.editors.together import JointSource
from practicum.ports import JointTokens, MixedRequest, Reading, TokenRule
from practicum.rollouts.source import SourceParts


class Config(JointSource):
    """The teacher writes from a gap above `above` until a gap below `below`: hysteresis.

    The gap is KL(T || S) at the position, in nats. With `below` under 0 the teacher finishes the
    text, and with a large `above` the student writes all of it.
    """

    type: Literal["handover"] = "handover"
    above: float = 2.0
    below: float = 0.5

    @model_validator(mode="after")
    def _check_order(self) -> "Config":
        if self.below > self.above:
            raise ValueError(
                f"below is {self.below} and above {self.above}; below may not exceed above, or the "
                "writers would change at every token"
            )
        return self

    def build_rule(self, requests: Sequence[MixedRequest], parts: SourceParts) -> TokenRule:
        """Return the rule for one call."""
        return GapRule(self.above, self.below)


class HandoverRule(TokenRule):
    """`teaching` are the texts that the teacher writes now; a subclass changes the set."""

    def __init__(self) -> None:
        self.teaching: set[int] = set()

    def write(self, texts: Sequence[int], student: Reading, teacher: Reading) -> JointTokens:
        """Write each text's token with its present writer."""
        gaps = F.forward_kl(student.logits.log_softmax(-1), teacher.logits.log_softmax(-1))
        for text, gap in zip(texts, gaps.tolist(), strict=True):
            self.decide(text, gap)
        return choose_writer([text in self.teaching for text in texts], student, teacher)

    def decide(self, text: int, gap: float) -> None:
        """Hand the text over or back, given the gap of the models at its next token in nats."""
        raise NotImplementedError


class GapRule(HandoverRule):
    """Two thresholds, so that the writers do not change at every token."""

    def __init__(self, above: float, below: float) -> None:
        super().__init__()
        self.above, self.below = above, below

    def decide(self, text: int, gap: float) -> None:
        """Take over above the upper threshold, and hand back below the lower one."""
        if gap > self.above:
            self.teaching.add(text)
        elif gap < self.below:
            self.teaching.discard(text)


def choose_writer(is_teachers: Sequence[bool], student: Reading, teacher: Reading) -> JointTokens:
    """Return the proposal of each text's writer."""
    by_teacher = torch.tensor(is_teachers, device=student.logits.device)
    tokens, logprobs = (
        torch.where(by_teacher, teachers, students)
        for students, teachers in zip(student.proposal, teacher.proposal, strict=True)
    )
    return JointTokens(tokens, logprobs, by_teacher)
