"""Speculative decoding: the student drafts the target's text, and the target keeps what it can."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.functional.sequence import gather_logprobs
from practicum.functional.speculative import acceptance, residual, speculative_logprobs
from practicum.methods.editors.together import JointSource
from practicum.ports import JointTokens, MixedRequest, Reading, TokenRule
from practicum.rollouts.source import SourceParts
from practicum.types import Metrics, Rollout


class Config(JointSource):
    """The teacher's text, drafted by the student `gamma` tokens at a time (2211.17192).

    Accepted drafts are the student's tokens. The teacher writes the replacement of a rejected draft,
    and one token after `gamma` accepted drafts. With `coupling: rejection` the most drafts are
    accepted. With `shared` both models use the teacher's random numbers of the position, so the
    text is the teacher's own to the byte, and fewer drafts are accepted. A lenience below 1 accepts
    more drafts, and the text then is no longer the teacher's (DistillSpec 2310.08461). Both models
    read the text token by token: this says which drafts are accepted, and is not faster.
    """

    type: Literal["speculative"] = "speculative"
    gamma: int = Field(default=4, ge=0)
    coupling: Literal["rejection", "shared"] = "rejection"
    lenience: float = Field(default=1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _check_lenience(self) -> Self:
        if self.coupling == "shared" and self.lenience < 1:
            raise ValueError(
                "lenience: shared random numbers accept only equal tokens; leave it out"
            )
        return self

    def build_rule(self, requests: Sequence[MixedRequest], parts: SourceParts) -> TokenRule:
        """Return the rule, with a random stream per request."""
        seeds = [request.seed for request in requests]
        seeds = None if self.coupling == "shared" else seeds
        return SpeculativeRule(self.gamma, seeds, self.lenience)

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
    """Accept drafts by rejection with random numbers from `seeds`, or without seeds by equality."""

    def __init__(self, gamma: int, seeds: Sequence[int] | None, lenience: float = 1.0) -> None:
        self.gamma, self.lenience = gamma, lenience
        self.drafts: Counter[int] = Counter()
        self.streams = (
            None
            if seeds is None
            else [torch.Generator().manual_seed(seed_of(seed, "accept")) for seed in seeds]
        )

    def write(self, texts: Sequence[int], student: Reading, teacher: Reading) -> JointTokens:
        """Write one token per text: an accepted draft, or a token of the target."""
        tokens, logprobs = teacher.proposal
        is_drafted = torch.tensor([self.drafts[n] < self.gamma for n in texts]).to(tokens.device)
        if self.streams is None:
            accepted = is_drafted & (teacher.draw(student.logprobs)[0] == tokens)
        else:
            drafts, _ = student.proposal
            pair = student.logprobs, teacher.logprobs
            draft, target = (gather_logprobs(logprobs, drafts) for logprobs in pair)
            chances = acceptance(draft, target, self.lenience)
            accepted = is_drafted & (self.draw_uniforms(texts).to(chances.device) < chances)
            replacements, _ = teacher.draw(residual(*pair, self.lenience))
            verified = torch.where(accepted, drafts, replacements)
            tokens = torch.where(is_drafted, verified, tokens)
            law = speculative_logprobs(*pair, self.lenience)
            verified_logprobs = gather_logprobs(law, verified).to(logprobs.dtype)
            logprobs = torch.where(is_drafted, verified_logprobs, logprobs)
        for text, is_accepted in zip(texts, accepted.tolist(), strict=True):
            self.drafts[text] = self.drafts[text] + 1 if is_accepted else 0
        return JointTokens(tokens, logprobs, ~accepted)

    def draw_uniforms(self, texts: Sequence[int]) -> Float[Tensor, " B"]:
        """Return the next random number of each text, from [0, 1)."""
        assert self.streams is not None, "shared random numbers need no others"
        return torch.cat([torch.rand(1, generator=self.streams[text]) for text in texts])
