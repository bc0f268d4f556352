"""Define the signals between two vocabularies: losses as published for teachers with another tokenizer."""

from typing import ClassVar, Literal

from pydantic import Field

from practicum.objective.estimators import Pathwise
from practicum.objective.signals import Full, Gradient, Sampled, SignalCall, Spelled


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
    its text, by the powers of `decay` (P-KL of X-Token 2605.21699).
    """

    type: Literal["projected"] = "projected"
    decay: float = Field(default=0.5, ge=0, le=1)
    measures: ClassVar[bool] = True

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
