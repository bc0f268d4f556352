"""The teacher takes the baton where it would reconsider and the student would not."""

from collections import Counter
from collections.abc import Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import Field

from practicum.errors import RecipeError
from practicum.methods.editors.handover import choose_writer
from practicum.methods.editors.together import JointSource
from practicum.ports import JointTokens, MixedRequest, Reading, TokenRule
from practicum.rollouts.source import SourceParts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REFLECTIONS = "Wait+But+Hmm+Actually+Hold+However+Yet+Oh+Alternatively+No+Ah+Oops+Well"


class Config(JointSource):
    """The teacher takes over at a reflection that the student lacks (Relay-OPD 2607.26057).

    The trigger: the teacher's most likely token is one of `words`, and the student has it neither as
    its draft nor among its `top` tokens. The teacher writes it and continues up to the `paragraphs`-th
    token with `boundary`, at most `most` tokens. After the last of `takeovers` the text ends there.
    A word counts with a capital or without, and after a space, if that is one token.
    """

    type: Literal["relay"] = "relay"
    top: int = Field(default=5, ge=1)
    takeovers: int = Field(default=2, ge=0)
    paragraphs: int = Field(default=3, ge=1)
    most: int = Field(default=256, ge=1)
    words: str = REFLECTIONS
    boundary: str = Field(default="\\n\\n", min_length=1)

    def build_rule(self, requests: Sequence[MixedRequest], parts: SourceParts) -> TokenRule:
        """Return the rule with the token ids of reflections and boundaries."""
        tokenizer = parts.writers.renderer.tokenizer
        spellings = {
            space + form
            for word in self.words.split("+")
            for form in (word, word.lower())
            for space in ("", " ")
        }
        encoded = [tokenizer.encode(text, add_special_tokens=False) for text in sorted(spellings)]
        reflections = {ids[0] for ids in encoded if len(ids) == 1}
        if not reflections and self.takeovers:
            raise RecipeError(
                f"rollout.source: relay: none of the words {self.words} is one token of the model, so the "
                "teacher would never take over; set words=A+B to words that are"
            )
        return RelayRule(
            self,
            reflections=reflections,
            boundaries=_find_tokens_with(tokenizer, self.boundary.replace("\\n", "\n")),
        )


class RelayRule(TokenRule):
    """`left` are the paragraphs and tokens left to the teacher, by text that it writes now."""

    def __init__(
        self, config: Config, reflections: Collection[int], boundaries: Collection[int]
    ) -> None:
        self.config = config
        self.reflections = torch.tensor(sorted(reflections), dtype=torch.long)
        self.boundaries = frozenset(boundaries)
        self.left: dict[int, tuple[int, int]] = {}
        self.completed: Counter[int] = Counter()

    def write(self, texts: Sequence[int], student: Reading, teacher: Reading) -> JointTokens:
        """Write one token per text, and end texts after their last takeover."""
        config = self.config
        best = teacher.logits.argmax(dim=-1)
        top = student.logits.topk(min(config.top, student.logits.shape[-1]), dim=-1).indices
        free = [text not in self.left and self.completed[text] < config.takeovers for text in texts]
        is_handover = (
            torch.tensor(free, device=best.device)
            & torch.isin(best, self.reflections.to(best.device))
            & ~(top == best[:, None]).any(dim=-1)
        )
        drafts, _ = student.proposal
        by_teacher = is_handover & (best != drafts)
        is_trigger = by_teacher.tolist()
        joint = choose_writer(
            [t or text in self.left for t, text in zip(is_trigger, texts, strict=True)],
            student,
            teacher,
        )
        # The word is certain: a student that drafts it writes the same token.
        tokens = torch.where(is_handover, best, joint.tokens)
        logprobs = torch.where(is_handover, 0.0, joint.logprobs)
        ended = [
            self._follow(text, token, is_first)
            for text, token, is_first in zip(texts, tokens.tolist(), is_trigger, strict=True)
        ]
        return JointTokens(tokens, logprobs, joint.by_teacher, torch.tensor(ended))

    def _follow(self, text: int, token: int, is_trigger: bool) -> bool:
        """Count a token of the teacher; return True if the text ends with it."""
        if is_trigger:
            self.left[text] = (self.config.paragraphs, self.config.most + 1)
        if text not in self.left:
            return False
        paragraphs, count = self.left[text]
        self.left[text] = paragraphs - (token in self.boundaries), count - 1
        if min(self.left[text]) > 0:
            return False
        del self.left[text]
        self.completed[text] += 1
        return self.completed[text] == self.config.takeovers


@cache
def _find_tokens_with(tokenizer: "PreTrainedTokenizerBase", text: str) -> frozenset[int]:
    """Return the tokens that decode to a text with `text` in it."""
    return frozenset(n for n in range(len(tokenizer)) if text in str(tokenizer.decode([n])))
