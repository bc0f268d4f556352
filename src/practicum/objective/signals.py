"""How much of a teacher is asked for: the signals of a term, each with what answers it and how it is learned from."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from practicum.core.calls import Call
from practicum.objective.estimators import K2Surrogate, Pathwise, ScoreFunction

SignalName = Literal["sampled", "topk", "full"]
AdvantageName = Literal["group_normalized", "group_mean", "leave_one_out", "none"]
Gradient = Pathwise | ScoreFunction | K2Surrogate


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a scorer can answer: the signals, the supports of a top-k signal and the largest k (None: any).

    `writes` is whether it can also write answers of its own, `needs_candidates` whether the student's candidates, for a top-k
    signal on the student's support, must come with each request, because the student is not where it is. `follows_student` is
    whether a teacher may change as the student learns, or shares its modules, so that it is asked at its step and never ahead of
    it; so is a teacher taken that does not say.
    """

    signals: frozenset[SignalName]
    supports: frozenset[str] = frozenset({"student", "teacher", "union", "intersection"})
    largest_k: int | None = None
    writes: bool = True
    needs_candidates: bool = False
    follows_student: bool = True


class SignalCall(Call):
    """A signal, with the facts that decide where it can be used.

    - asks: a teacher (or the reference) is asked
    - whole: it gives the teacher's whole distribution at each token
    - measures: it gives enough of each state to measure a divergence there
    - sampled: it is about the sampled token alone
    - label: the token itself is the label
    - usual: the estimator that `auto` stands for
    """

    asks: ClassVar[bool] = True
    whole: ClassVar[bool] = False
    measures: ClassVar[bool] = False
    sampled: ClassVar[bool] = False
    label: ClassVar[bool] = False
    usual: ClassVar[Pathwise | ScoreFunction] = Pathwise()

    @property
    def question(self) -> "Full | Sampled | TopK | None":
        """Return what a teacher is asked for; None where none is."""
        return None

    @property
    def candidates(self) -> int:
        """Return how many candidates it is about at each token."""
        return 0

    @property
    def chooser(self) -> str:
        """Return whose likeliest tokens the candidates are."""
        return ""

    @property
    def tails(self) -> tuple[str, str]:
        """Return what becomes of the student's mass outside the candidates, and of the teacher's."""
        return "drop", "drop"

    @property
    def drawn(self) -> int:
        """Return how many extra tokens are drawn from the student at each state."""
        return 0

    @property
    def outcome(self) -> AdvantageName | None:
        """Return how the verifier's reward is the advantage of a completion; None where it has no part in the signal."""
        return None

    def refused_by(self, capabilities: Capabilities) -> str | None:
        """Return what of it a scorer cannot do, with what it can; None where it answers."""
        if self.question is None or self.question.type in capabilities.signals:
            return None
        return f"cannot give signal {self.question.type!r}; it can give: {', '.join(sorted(capabilities.signals))}"

    def conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Return why it does not go with an estimator, a divergence or a target (`plain`: the teacher as it is), or None."""
        return None


class Full(SignalCall):
    """Every log-probability of the teacher: exact, and no dearer than one token when both heads are local."""

    type: Literal["full"] = "full"
    whole: ClassVar[bool] = True
    measures: ClassVar[bool] = True

    @property
    def question(self) -> "Full":
        """Return the signal itself."""
        return self


class Sampled(SignalCall):
    """One teacher log-probability a token, that of the token the student sampled."""

    type: Literal["sampled"] = "sampled"
    sampled: ClassVar[bool] = True
    usual: ClassVar[Pathwise | ScoreFunction] = ScoreFunction()

    @property
    def question(self) -> "Sampled":
        """Return the signal itself."""
        return self

    def conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse to differentiate a divergence that is known at one token."""
        if not isinstance(gradient, Pathwise):
            return None
        return (
            "estimator 'pathwise' needs more than one token's log-probability; with signal 'sampled' "
            "write estimator: score_function"
        )


class TopK(SignalCall):
    """K candidates a token, chosen by `support`; what becomes of the other mass is `tail`'s choice."""

    type: Literal["topk"] = "topk"
    k: int = Field(default=64, ge=1)
    support: Literal["student", "teacher", "union", "intersection"] = "student"
    tail: Literal["bucket", "renorm", "renorm_teacher", "drop", "sampled"] = "bucket"
    measures: ClassVar[bool] = True

    @property
    def question(self) -> "TopK":
        """Return the signal itself."""
        return self

    @property
    def candidates(self) -> int:
        """Return k."""
        return self.k

    @property
    def chooser(self) -> str:
        """Return the support."""
        return self.support

    @property
    def tails(self) -> tuple[str, str]:
        """Return what becomes of the student's mass outside the candidates, and of the teacher's."""
        return ("drop", "renorm") if self.tail == "renorm_teacher" else (self.tail, self.tail)

    def refused_by(self, capabilities: Capabilities) -> str | None:
        """Refuse a support that cannot be scored too, and more candidates than are answered."""
        largest_k = capabilities.largest_k
        if problem := super().refused_by(capabilities):
            return problem
        if self.support not in capabilities.supports:
            return f"cannot score support {self.support!r}; it can: {', '.join(sorted(capabilities.supports))}"
        if largest_k is not None and self.k > largest_k:
            return f"answers at most k={largest_k}, not {self.k}; write topk({largest_k}, support=teacher), or sampled"
        return None

    def conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse a divergence that is no sum over the candidates that the tail leaves."""
        pathwise = isinstance(gradient, Pathwise)
        if self.tail == "drop" and pathwise and divergence != "ce":
            return (
                "a partial sum over candidates (tail 'drop') is no divergence: it can be negative and its gradient ignores the "
                "rest; write tail=bucket or tail=renorm, or divergence: ce"
            )
        if self.tail == "renorm_teacher" and not (pathwise and divergence in ("ce", "forward_kl")):
            return (
                "tail 'renorm_teacher' sums over the tokens that the truncated teacher may say, which leaves nothing out of ce and "
                "forward_kl alone; write divergence: forward_kl with estimator: pathwise, or tail=renorm"
            )
        return None


class Draws(SignalCall):
    """K extra tokens drawn from the student at each state, scored by the teacher (AsyncOPD 2606.24143)."""

    type: Literal["mc"] = "mc"
    k: int = Field(default=16, ge=1)
    usual: ClassVar[Pathwise | ScoreFunction] = ScoreFunction()

    @property
    def question(self) -> Full:
        """Return the whole distribution: the drawn tokens are scored from it."""
        return Full()

    @property
    def drawn(self) -> int:
        """Return k."""
        return self.k

    def conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse all but a score function."""
        if isinstance(gradient, ScoreFunction):
            return None
        return "signal 'mc' has drawn tokens, which no divergence is a sum over; write estimator: score_function"


class Text(SignalCall):
    """The rollout's own tokens are the label, whoever wrote them; no teacher is asked (SFT, SeqKD 1606.07947)."""

    type: Literal["text"] = "text"
    asks: ClassVar[bool] = False
    label: ClassVar[bool] = True

    def conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse all but the cross-entropy of the label."""
        if divergence != "ce":
            return "signal 'text' has one label a token, the token itself; write divergence: ce"
        if not isinstance(gradient, Pathwise) or not plain:
            return "signal 'text' is its own target and is differentiated itself; leave out target and estimator"
        return None


class Score(SignalCall):
    """One reward a completion, from the verifier; no teacher is asked.

    `advantage`: group_normalized is GRPO, group_mean Dr. GRPO, leave_one_out RLOO and none REINFORCE.
    """

    type: Literal["score"] = "score"
    advantage: AdvantageName = "group_normalized"
    asks: ClassVar[bool] = False
    sampled: ClassVar[bool] = True
    usual: ClassVar[Pathwise | ScoreFunction] = ScoreFunction()

    @property
    def outcome(self) -> AdvantageName:
        """Return the advantage."""
        return self.advantage

    def conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse what is said of a teacher."""
        if not isinstance(gradient, ScoreFunction):
            return "signal 'score' is a reward, not a function of the logits; write estimator: score_function"
        if divergence != "reverse_kl" or not plain or gradient != ScoreFunction():
            return "signal 'score' asks no teacher; leave out target, divergence and the estimator's arguments"
        return None
