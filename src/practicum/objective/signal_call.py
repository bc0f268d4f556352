"""The base of all signals of a term, and the three signals that a teacher can give.

A signal is one file of `practicum.objective.signals`, or a module of another package, with a class
`Config` below `SignalCall`: the question to a teacher, and the way from the answer to a loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from pydantic import AfterValidator, BeforeValidator, Field, SerializeAsAny, WithJsonSchema
from torch import Tensor

from practicum.core.calls import Call
from practicum.core.plugins import PLUGIN_KEY, read_part
from practicum.functional.divergence_entry import DIVERGENCES
from practicum.objective.distribution import (
    EXAMPLE,
    DrawnTokens,
    SignalComparison,
    TeacherDistribution,
    check_shape,
)
from practicum.objective.entries import check_advantage
from practicum.objective.estimator_call import EstimatorCall, Pathwise, ScoreFunction
from practicum.objective.translated_answer import TranslatedAnswer
from practicum.types import Metrics, Rollout, TeacherSignal, TokenRecord

SignalName = Literal["sampled", "topk", "full"]
AdvantageName = Annotated[str, AfterValidator(check_advantage)]
"""The name of an advantage of practicum, a registered one, or `package.module:entry`."""

ANSWERS = "answers"
"""The column with two probabilities of a token's answer, the student's and the model's.

Each is the geometric mean of the probabilities of the answer's tokens.
"""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The answers that a scorer can give.

    `signals`, `supports` and `largest_k` are the signals, the supports of a top-k signal and the
    largest k (None: any). `writes` is True if the scorer can also generate completions.
    `needs_candidates` is True if a top-k request on the student's support must contain the
    candidates, because the student runs elsewhere. `raw_logits` is True if the heads that come with
    the signal `full` give raw logits of the model, before a softmax. `splits_answers` is True if
    the answers of several members are trained as separate losses. `follows_student` is True if a
    teacher may change as the student learns, or shares its modules: it is then called in the step
    that needs it, never ahead of time. True is also the default for a teacher that does not declare
    it. `by_span` is True if a sampled log-probability may be the joint log-probability of several
    tokens; see `practicum.types.TeacherSignal`. `repeats_scores` is True if identical scores for
    all tokens of an answer are no sign of an error. `advice` explains how to get further signals.
    """

    signals: frozenset[SignalName]
    supports: frozenset[str] = frozenset({"student", "teacher", "union", "intersection"})
    largest_k: int | None = None
    writes: bool = True
    needs_candidates: bool = False
    follows_student: bool = True
    by_span: bool = False
    repeats_scores: bool = False
    raw_logits: bool = False
    splits_answers: bool = False
    advice: str = ""


NO_CAPABILITIES = Capabilities(
    signals=frozenset(), supports=frozenset(), writes=False, follows_student=False
)
"""The capabilities of a teacher that never answers."""

EVERY_SIGNAL = Capabilities(
    signals=frozenset({"sampled", "topk", "full"}), follows_student=False, raw_logits=True
)
"""The capabilities of a model with hidden states: up to its full distribution at each token."""


class SignalCall(Call):
    """A signal, with the facts that decide where it can be used.

    - whole: it gives the teacher's full distribution at each token
    - measures: it gives enough of each state to measure a divergence there
    - sampled: it uses only the sampled token
    - label: the token itself is the label
    - pairs: it compares two whole completions of a prompt
    - compares: it computes its own divergence with `compare`
    - unshared: it reads tokens that only one of two vocabularies has
    - alone: it uses only the student's full distribution
    - needs_student_level: it reads the level of the student's raw logits
    - reads_answers: it reads the column `ANSWERS` of the model's extras
    - usual: the estimator that `auto` stands for
    """

    whole: ClassVar[bool] = False
    measures: ClassVar[bool] = False
    sampled: ClassVar[bool] = False
    label: ClassVar[bool] = False
    pairs: ClassVar[bool] = False
    compares: ClassVar[bool] = False
    unshared: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    needs_student_level: ClassVar[bool] = False
    reads_answers: ClassVar[bool] = False
    usual: ClassVar[EstimatorCall] = Pathwise()

    @property
    def question(self) -> "Full | Sampled | TopK | None":
        """Return the signal to request from a teacher; None if no teacher is needed."""
        return None

    @property
    def candidates(self) -> int:
        """Return the number of candidates at each token."""
        return 0

    @property
    def chooser(self) -> str:
        """Return the name of the support from which the candidates come."""
        return ""

    @property
    def tails(self) -> tuple[str, str]:
        """Return the treatment of the mass outside the candidates: the student's, the teacher's."""
        return "drop", "drop"

    @property
    def drawn(self) -> int:
        """Return the number of extra tokens that are drawn from the student at each state."""
        return 0

    @property
    def step(self) -> int:
        """Return the tokens per step of returns from raw logits; 0 without such returns."""
        return 0

    @property
    def outcome(self) -> AdvantageName | None:
        """Return the rule that turns the verifier's reward into an advantage.

        None if the reward has no part in the signal.
        """
        return None

    @property
    def by_reward(self) -> bool:
        """Return True if the verifier's reward decides which completions become more likely."""
        return self.outcome is not None

    @property
    def reward_unit(self) -> Literal["rollout", "episode", "turn", "step"]:
        """Return the unit that gets an advantage: a rollout, a whole conversation, or each turn.

        A turn's return has the rewards of later turns, and a step's has not.
        """
        return "rollout"

    @property
    def compares_within_source(self) -> bool:
        """Return True if the rewards are compared only among the completions of the term's source."""
        return False

    @property
    def span_share(self) -> Literal["whole", "even", "surprise"]:
        """Return the share of a span's advantage that each of its tokens gets."""
        return "whole"

    @property
    def answers_for_ends(self) -> bool:
        """Return True if the token after a span accounts for the end of the span."""
        return False

    def explain_refusal(self, capabilities: Capabilities) -> str | None:
        """Explain why a scorer cannot give this signal and list its signals; None if it can."""
        if self.question is None or self.question.type in capabilities.signals:
            return None
        return (
            f"cannot give signal {self.question.type!r}; it can give: "
            f"{', '.join(sorted(capabilities.signals))}"
            f"{capabilities.advice and '; ' + capabilities.advice}"
        )

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Explain why the signal does not support an estimator, a divergence or a target, or return
        None.

        `plain` is True if the target is the unmodified teacher.
        """
        return None

    def explain_extras(self, *, has_reward: bool, clip: str, source: str) -> str | None:
        """Explain why the signal rejects a reward, a clip or the term's source, or return None."""
        return None

    @property
    def maps_pace(self) -> float | None:
        """Return the relative learning rate of the signal's own weights, or None if it has none."""
        return None

    def try_out(self) -> None:
        """Compare two models at two tokens of three, if the signal has its own comparison."""
        if not self.compares:
            return
        student, teacher = EXAMPLE, EXAMPLE.flip(0)
        distribution = TeacherDistribution(teacher, torch.tensor([[0], [2]]), teacher[:, :1])
        entry = DIVERGENCES["reverse_kl"]
        values = self.compare(SignalComparison(student, distribution, torch.tensor([0, 1]), entry))
        check_shape("compare", values, (2,))

    def compare(self, comparison: SignalComparison) -> Float[Tensor, " T"]:
        """Return the divergence at each token, differentiable in the student.

        It is called if `compares` is True.
        """
        raise NotImplementedError

    def compute_drawn_loss(self, sample: DrawnTokens) -> Float[Tensor, " T"]:
        """Return the loss at each token. It is called if `drawn` is not 0."""
        raise NotImplementedError

    def compute_fixed_advantage(self, logprobs: Float[Tensor, " T"]) -> Float[Tensor, " T"] | None:
        """Return an advantage that depends only on the student's log-probabilities, or None."""
        return None

    def read_groups(self, extras: Mapping[str, Tensor]) -> Int[Tensor, " T"] | None:
        """Return the length of each group of tokens that are read together, at its first token.

        A token in no group has length 0 or 1. None: there are no groups.
        """
        return None

    def measure(self, rollouts: Sequence[Rollout], outputs: TokenRecord) -> Metrics:
        """Return more metrics of a step, from the numbers of its tokens."""
        return {}

    def compute_state_values(self, teacher: TeacherDistribution) -> Float[Tensor, " T"] | None:
        """Return the value of each state from raw logits, or None if the signal has no such returns."""
        return None


class Full(SignalCall):
    """Every log-probability of the teacher: exact, and if both heads are local, as cheap as one."""

    type: Literal["full"] = "full"
    reads_more: ClassVar[bool] = False
    """True if `add_more` adds something to a translated answer."""
    whole: ClassVar[bool] = True
    measures: ClassVar[bool] = True

    @property
    def question(self) -> "Full":
        """Return the signal itself."""
        return self

    def add_more(self, signal: TeacherSignal, answer: TranslatedAnswer) -> TeacherSignal:
        """Add columns or constants that only this signal reads from a translated answer.

        `signal` has the answer at the student's tokens that are also single tokens of the teacher.
        """
        return signal


class Sampled(SignalCall):
    """The teacher's log-probability of each token that the student sampled.

    `share` is the share of a span's log-ratio that each token gets: `whole`, the exact gradient;
    `even`; or `surprise`, proportional to the token's log-probability (DPCA 2606.09456). The last
    two are not gradients: see [another tokenizer](teachers.md#another-tokenizer).
    """

    type: Literal["sampled"] = "sampled"
    share: Literal["whole", "even", "surprise"] = "whole"
    sampled: ClassVar[bool] = True
    usual: ClassVar[EstimatorCall] = ScoreFunction()

    @property
    def question(self) -> "Sampled":
        """Return the signal without the share, which does not concern the teacher."""
        return Sampled()

    @property
    def span_share(self) -> Literal["whole", "even", "surprise"]:
        """Return the share."""
        return self.share

    @property
    def answers_for_ends(self) -> bool:
        """Return True for the exact gradient: published losses do not define the ends of spans."""
        return self.share == "whole"

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse to differentiate a divergence that is only known at one token."""
        if self.share != "whole" and divergence != "reverse_kl":
            return (
                f"share {self.share!r} divides the log-ratio of a span among its tokens; set "
                "divergence: reverse_kl, or leave share out"
            )
        if not gradient.pathwise:
            return None
        return (
            "estimator 'pathwise' needs more than one token's log-probability; "
            "with signal 'sampled' set estimator: score_function"
        )


class TopK(SignalCall):
    """K candidates per token, chosen by `support`; `tail` decides about the mass outside them."""

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
        """Return the treatment of the mass outside the candidates: the student's, the teacher's."""
        return ("drop", "renorm") if self.tail == "renorm_teacher" else (self.tail, self.tail)

    def explain_refusal(self, capabilities: Capabilities) -> str | None:
        """Refuse also an unsupported support and more candidates than the scorer returns."""
        largest_k = capabilities.largest_k
        if problem := super().explain_refusal(capabilities):
            return problem
        if self.support not in capabilities.supports:
            return (
                f"cannot score support {self.support!r}; it can: "
                f"{', '.join(sorted(capabilities.supports))}"
            )
        if largest_k is not None and self.k > largest_k:
            return (
                f"answers at most k={largest_k}, not {self.k}; write topk({largest_k}, "
                "support=teacher), or sampled"
            )
        return None

    def explain_conflict(self, gradient: EstimatorCall, divergence: str, plain: bool) -> str | None:
        """Refuse a divergence that is not a sum over the candidates that remain under the tail."""
        pathwise = gradient.pathwise
        if self.tail == "drop" and pathwise and divergence != "ce":
            return (
                "a partial sum over candidates (tail 'drop') is not a divergence: "
                "it can be negative and its gradient ignores the rest; "
                "write tail=bucket or tail=renorm, or divergence: ce"
            )
        if self.tail == "renorm_teacher" and not (pathwise and divergence in ("ce", "forward_kl")):
            return (
                "tail 'renorm_teacher' sums over the tokens that the truncated teacher can generate, "
                "which is complete only for ce and forward_kl; set divergence: "
                "forward_kl with estimator: pathwise, or tail=renorm"
            )
        return None


SIGNALS = "practicum.objective.signals"
"""The package with the signals, one file each."""


Signal = Annotated[
    SerializeAsAny[SignalCall],
    BeforeValidator(partial(read_part, SIGNALS, SignalCall)),
    WithJsonSchema({PLUGIN_KEY: SIGNALS}),
]
"""A signal in a recipe."""
