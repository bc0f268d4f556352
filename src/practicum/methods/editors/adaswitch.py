"""The student writes until it strays, by a threshold that follows the text; the teacher finishes."""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from practicum.methods.editors.handover import HandoverRule
from practicum.methods.editors.together import JointSource
from practicum.ports import MixedRequest, TokenRule
from practicum.rollouts.source import SourceParts


class Config(JointSource):
    """The teacher writes the rest once the gap exceeds `factor` times its recent mean (2510.07842).

    The mean is of KL(T || S) at the last `window` tokens. The first token has no mean before it and
    is the student's, except with `factor` 0: then the teacher writes all.
    """

    type: Literal["adaswitch"] = "adaswitch"
    factor: float = Field(default=3.0, ge=0)
    window: int = Field(default=8, ge=1)

    def build_rule(self, requests: Sequence[MixedRequest], parts: SourceParts) -> TokenRule:
        """Return the rule for one call."""
        return AdaptiveRule(self.factor, self.window)


class AdaptiveRule(HandoverRule):
    """Compare each gap with the moving mean of the gaps before it."""

    def __init__(self, factor: float, window: int) -> None:
        super().__init__()
        self.factor = factor
        self.gaps: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=window))

    def decide(self, text: int, gap: float) -> None:
        """Hand over for good; a text is never handed back."""
        recent = self.gaps[text]
        if self.factor == 0 or (recent and gap > self.factor * sum(recent) / len(recent)):
            self.teaching.add(text)
        recent.append(gap)
