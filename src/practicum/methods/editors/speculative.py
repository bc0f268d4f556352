"""Speculative decoding: the student drafts the target's text, and the target keeps what it can."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.functional.sequence import gather_logprobs
from practicum.functional.speculative import acceptance, residual
from practicum.methods.editors.together import JointSource
from practicum.ports import JointTokens, MixedRequest, Reading, TokenRule
from practicum.rollouts.source import SourceParts
from practicum.types import Metrics, Rollout


class Config(JointSource):
    """The teacher's text, drafted by the student `gamma` tokens at a time (2211.17192).

    Accepted drafts are the student's tokens. The teacher writes the replacement of a rejected draft,
    and one token after `gamma` accepted drafts. With `coupling: rejection` the most drafts are
    accepted. With `shared` both models use the teacher's random numbers of the position, so the
    text is the teacher's own to the byte, and fewer drafts are accepted. Both models read the text
    token by token: this says which drafts are accepted, and is not faster.
    """

    type: Literal["speculative"] = "speculative"
    gamma: int = Field(default=4, ge=0)
    coupling: Literal["rejection", "shared"] = "rejection"

    def build_rule(self, requests: Sequence[MixedRequest], parts: SourceParts) -> TokenRule:
        """Return the rule, with random numbers of its own for each request."""
        if self.coupling == "shared":
            return SharedRule(self.gamma)
        return RejectionRule(self.gamma, [request.seed for request in requests])

    @classmethod
    def measure(cls, rollouts: Sequence[Rollout]) -> Metrics:
        """Return the tokens per call of the target, and the teacher's share of the tokens."""
        # Every call of the target ends with one of its tokens, except a call cut by the end.
        calls = sum(
            int(by_teacher.sum()) + int(not by_teacher[-1:].all())
            for by_teacher in (rollout.mark_tokens_by("teacher") for rollout in rollouts)
        )
        tokens = sum(len(rollout.tokens) for rollout in rollouts)
        return super().measure(rollouts) | {"tokens_per_call": tokens / max(calls, 1)}


class SpeculativeRule(TokenRule):
    """Count the drafts of each text since its last token by the target."""

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self.drafts: Counter[int] = Counter()

    def write(self, texts: Sequence[int], student: Reading, teacher: Reading) -> JointTokens:
        """Write one token per text: an accepted draft, or a token of the target."""
        is_drafted = torch.tensor([self.drafts[text] < self.gamma for text in texts])
        joint = self.verify(texts, student, teacher, is_drafted.to(teacher.logits.device))
        assert joint.by_teacher is not None
        for text, by_teacher in zip(texts, joint.by_teacher.tolist(), strict=True):
            self.drafts[text] = 0 if by_teacher else self.drafts[text] + 1
        return joint

    def verify(
        self,
        texts: Sequence[int],
        student: Reading,
        teacher: Reading,
        is_drafted: Bool[Tensor, " B"],
    ) -> JointTokens:
        """Accept or replace a draft where `is_drafted`; elsewhere the target writes."""
        raise NotImplementedError


class SharedRule(SpeculativeRule):
    """Draft with the target's random numbers; a draft that equals the target's token is accepted."""

    def verify(
        self,
        texts: Sequence[int],
        student: Reading,
        teacher: Reading,
        is_drafted: Bool[Tensor, " B"],
    ) -> JointTokens:
        """Return the tokens that the target writes alone."""
        tokens, logprobs = teacher.proposal
        drafts, _ = teacher.draw(student.logprobs)
        return JointTokens(tokens, logprobs, ~(is_drafted & (drafts == tokens)))


class RejectionRule(SpeculativeRule):
    """Accept a draft with probability min(1, T / S), or replace it from the residual."""

    def __init__(self, gamma: int, seeds: Sequence[int]) -> None:
        super().__init__(gamma)
        self.streams = [torch.Generator().manual_seed(seed_of(seed, "accept")) for seed in seeds]

    def verify(
        self,
        texts: Sequence[int],
        student: Reading,
        teacher: Reading,
        is_drafted: Bool[Tensor, " B"],
    ) -> JointTokens:
        """Return tokens with the target's distribution, whatever the student drafts."""
        drafts, _ = student.proposal
        chances = acceptance(
            gather_logprobs(student.logprobs, drafts), gather_logprobs(teacher.logprobs, drafts)
        )
        accepted = is_drafted & (self.draw_uniforms(texts).to(chances.device) < chances)
        own_tokens, own_logprobs = teacher.proposal
        replacements, _ = teacher.draw(residual(student.logprobs, teacher.logprobs))
        tokens: Int[Tensor, " B"] = torch.where(is_drafted, replacements, own_tokens)
        tokens = torch.where(accepted, drafts, tokens)
        logprobs = gather_logprobs(teacher.logprobs, tokens)
        logprobs = torch.where(is_drafted, logprobs, own_logprobs)
        return JointTokens(tokens, logprobs, ~accepted)

    def draw_uniforms(self, texts: Sequence[int]) -> Float[Tensor, " B"]:
        """Return the next random number of each text, from [0, 1)."""
        return torch.cat([torch.rand(1, generator=self.streams[text]) for text in texts])
