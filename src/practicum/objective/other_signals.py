"""Define the signals between two vocabularies: losses as published for teachers with another tokenizer."""

from typing import ClassVar, Literal

from pydantic import Field

from practicum.objective.estimators import Pathwise
from practicum.objective.signals import (
    Capabilities,
    Full,
    Gradient,
    Joined,
    Sampled,
    SignalCall,
    Spelled,
)


class Binarised(SignalCall):
    """The divergence of two Bernoulli variables, a sampled span or anything else, differentiated.
    Both have probability p ** (1 / `tau`). ALM 2503.20083.
    """

    type: Literal["binarised"] = "binarised"
    tau: float = Field(default=1.0, gt=0)
    sampled: ClassVar[bool] = True

    @property
    def question(self) -> Sampled:
        """Return the log-probabilities of sampled tokens."""
        return Sampled()

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse every estimator but the derivative itself."""
        if isinstance(gradient, Pathwise) and plain:
            return None
        return (
            "signal 'binarised' differentiates a divergence to the teacher itself; leave out "
            "target and estimator"
        )


class Sorted(SignalCall):
    """The L1 distance of probabilities that are sorted, whatever their tokens (ULD 2402.12030).

    With `matched` the tokens that both vocabularies have are compared by the divergence, times
    their share of the teacher's vocabulary, and the others are sorted (GOLD).
    """

    type: Literal["sorted"] = "sorted"
    matched: bool = False
    measures: ClassVar[bool] = True
    unshared: ClassVar[bool] = True

    @property
    def question(self) -> Full:
        """Return the full distribution."""
        return Full()

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse every estimator but the derivative, and a divergence that nothing reads."""
        if not isinstance(gradient, Pathwise) or not plain:
            return (
                "signal 'sorted' differentiates a distance to the teacher itself; leave out target "
                "and estimator"
            )
        if not self.matched and divergence != "reverse_kl":
            return (
                "signal 'sorted' has a distance of its own; leave out divergence, or write "
                "sorted(matched=true), whose matched tokens it compares"
            )
        return None


class Projected(SignalCall):
    """The student's distribution carried over to the teacher's vocabulary, compared there.

    The probability of a token that the teacher lacks goes to the tokens by which the teacher writes
    its text, by the powers of `decay` (P-KL of X-Token 2605.21699). With `paired` a token whose
    largest part is at least that is compared with the token that gets it, and all others are sorted
    (H-KL).
    """

    type: Literal["projected"] = "projected"
    decay: float = Field(default=0.5, ge=0, le=1)
    paired: float | None = Field(default=None, gt=0.5, le=1)
    measures: ClassVar[bool] = True
    unshared: ClassVar[bool] = True

    @property
    def question(self) -> Spelled:
        """Return the full distribution, with spellings."""
        return Spelled()

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse every estimator but the derivative."""
        if isinstance(gradient, Pathwise) and plain:
            return None
        return (
            "signal 'projected' differentiates a divergence in the teacher's vocabulary; leave out "
            "target and estimator"
        )


class _ByStates(SignalCall):
    """A signal that reads a teacher's hidden states through its head."""

    @property
    def name(self) -> str:
        """Return the name by which a recipe asks for it."""
        return str(type(self).model_fields["type"].default)

    def explain_refusal(self, capabilities: Capabilities) -> str | None:
        """Refuse also a teacher without hidden states."""
        if problem := super().explain_refusal(capabilities):
            return problem
        # A translated teacher gives states through a head that is folded, which are no raw logits.
        if capabilities.raw_logits or capabilities.by_span:
            return None
        return (
            f"gives no hidden states, which signal {self.name!r} reads; write signal: full, or take a "
            "teacher of type model, self or translated"
        )

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse every estimator but the derivative."""
        if isinstance(gradient, Pathwise) and plain:
            return None
        return (
            f"signal {self.name!r} differentiates a divergence of its own; leave out target and "
            "estimator"
        )


class DualSpace(_ByStates):
    """The divergence in both models' spaces: each one's states also go through the other's head.

    Two linear maps between the states begin where they keep the logits of common tokens best, and
    learn at `pace` times the student's rate (DSKDv2 2504.11426).
    """

    type: Literal["dual_space"] = "dual_space"
    pace: float = Field(default=1.0, ge=0)
    measures: ClassVar[bool] = True
    unshared: ClassVar[bool] = True

    @property
    def question(self) -> Full:
        """Return the full distribution, which comes as hidden states and a head."""
        return Full()


class SpanToken(_ByStates):
    """The tokens that both vocabularies have, and one for the span of several that starts here.

    Its logit is the mean of its tokens' (SimCT 2605.07711).
    """

    type: Literal["span_token"] = "span_token"
    measures: ClassVar[bool] = True
    unshared: ClassVar[bool] = True

    @property
    def question(self) -> Joined:
        """Return the full distribution, with spans."""
        return Joined()
