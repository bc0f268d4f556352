"""The student writes, and the teacher replaces each token that it would not consider."""

from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field

from practicum.methods.editors.together import JointSource
from practicum.ports import JointTokens, MixedRequest, Reading, TokenRule
from practicum.rollouts.source import SourceParts


class Config(JointSource):
    """The student's token if the teacher's `top` tokens contain it, else the teacher's (SKD 2410.11325).

    With `top` 0 the teacher writes all tokens.
    """

    type: Literal["interleave"] = "interleave"
    top: int = Field(default=25, ge=0)

    def build_rule(self, requests: Sequence[MixedRequest], parts: SourceParts) -> TokenRule:
        """Return the rule, which has no state."""
        return InterleaveRule(self.top)


class InterleaveRule(TokenRule):
    """Accept the student's token by its rank at the teacher; otherwise the teacher samples one."""

    def __init__(self, top: int) -> None:
        self.top = top

    def write(self, texts: Sequence[int], student: Reading, teacher: Reading) -> JointTokens:
        """Write a token per text, with its probability over accepted and replaced proposals."""
        drafts, draft_logprobs = student.proposal
        replacements, replacement_logprobs = teacher.proposal
        smallest = teacher.logits.topk(min(self.top, teacher.logits.shape[-1]), dim=-1).values
        accepts = (
            teacher.logits >= smallest[:, -1:]
            if self.top
            else torch.zeros_like(teacher.logits, dtype=torch.bool)
        )
        by_teacher = ~accepts.gather(1, drafts[:, None])[:, 0]
        tokens = torch.where(by_teacher, replacements, drafts)
        # A token comes from an accepted draft or, after any rejected draft, from the teacher.
        drafted = student.logprobs.double().exp()
        rejected = (drafted * ~accepts).sum(dim=-1)
        chosen = tokens[:, None]
        from_draft = (drafted * accepts).gather(1, chosen)[:, 0]
        from_teacher = rejected * teacher.logprobs.double().exp().gather(1, chosen)[:, 0]
        logprobs = (from_draft + from_teacher).log().to(draft_logprobs.dtype)
        # Where only one model decides, its number is exact.
        logprobs = torch.where(rejected == 0, draft_logprobs, logprobs)
        none_accepted = (drafted * accepts).sum(dim=-1) == 0
        return JointTokens(
            tokens, torch.where(none_accepted, replacement_logprobs, logprobs), by_teacher
        )
