"""Rules by which two models that read the same text write its next token together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Bool, Float, Int
from torch import Tensor

from practicum import functional as F


class Reading(Protocol):
    """One model's view of the next token of B texts, with each text's random numbers for it.

    `logits` are the model's own, and `logprobs` its sampling distribution: after temperature, top-k
    and top-p, without banned tokens. `proposal` are samples of this distribution: tokens and their
    sampling log-probabilities.
    """

    @property
    def logits(self) -> Float[Tensor, "B V"]: ...

    @property
    def logprobs(self) -> Float[Tensor, "B V"]: ...

    @property
    def proposal(self) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]: ...

    def draw(self, scores: Float[Tensor, "B V"]) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
        """Sample from another distribution with the same random numbers.

        Return the tokens and their log-probabilities.
        """
        ...


@dataclass(frozen=True, slots=True)
class JointTokens:
    """The next tokens of B texts, and the log-probabilities that the rule writes them with.

    `by_teacher` marks the teacher's tokens; None if they have no single author. `ended` marks the
    texts that end here by the rule's own decision; None if the rule ends none.
    """

    tokens: Int[Tensor, " B"]
    logprobs: Float[Tensor, " B"]
    by_teacher: Bool[Tensor, " B"] | None = None
    ended: Bool[Tensor, " B"] | None = None


class TokenRule:
    """The rule of one sampling call. It may keep a state for each text of the call."""

    def write(self, texts: Sequence[int], student: Reading, teacher: Reading) -> JointTokens:
        """Write the next token of each of the texts, which are numbers of the call's requests."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class MixtureRule(TokenRule):
    """Sample from `share` of the teacher's and 1 - `share` of the student's distribution.

    Both are sampling distributions, and banned tokens are in neither (MiniLLM, arXiv 2306.08543).
    """

    share: float

    def write(self, texts: Sequence[int], student: Reading, teacher: Reading) -> JointTokens:
        """Sample every token from the mixture, with the student's random numbers."""
        if self.share == 0:
            return JointTokens(*student.proposal)
        sides = [(self.share, teacher.logprobs), (1.0 - self.share, student.logprobs)]
        return JointTokens(*student.draw(F.mixture(sides)))
