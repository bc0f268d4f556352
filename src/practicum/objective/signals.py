"""Define the signals of a term: what each asks of a teacher, and how it becomes a loss."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from practicum.core.calls import Call
from practicum.functional.advantages import ADVANTAGES
from practicum.functional.pairs import PAIR_LOSSES, PairLoss
from practicum.objective.entries import check_advantage
from practicum.objective.estimators import K2Surrogate, Pathwise, ScoreFunction

SignalName = Literal["sampled", "topk", "full"]
AdvantageName = Annotated[str, AfterValidator(check_advantage)]
"""The name of an advantage of practicum, a registered one, or `package.module:entry`."""
Gradient = Pathwise | ScoreFunction | K2Surrogate


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The answers that a scorer can give.

    These are the signals, the supports of a top-k signal and the largest k (None: any). `writes`
    is True if it can also generate completions. `needs_candidates` is True if a top-k request on
    the student's support must contain the candidates, because the student runs elsewhere.
    `raw_logits` is True if the heads that come with the signal `full` give logits as the model
    computes them, before a softmax. `splits_answers` is True if the answers of several members become
    several losses. `follows_student` is True if a teacher may change as the student learns, or shares
    its modules: it is then asked at its own step and never ahead. That is also the default for a
    teacher that does not declare it. `by_span` is True if a sampled log-probability may be that of
    several tokens together; see `practicum.types.TeacherSignal`. `repeats_scores` is True if all
    tokens of an answer may have one score although nothing is wrong. `advice` says what to write for
    further signals.
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


class SignalCall(Call):
    """A signal, with the facts that decide where it can be used.

    - whole: it gives the teacher's full distribution at each token
    - measures: it gives enough of each state to measure a divergence there
    - sampled: it is about the sampled token alone
    - label: the token itself is the label
    - pairs: it compares two whole completions of a prompt
    - unshared: it reads tokens that only one of two vocabularies has
    - alone: it is about the student's whole distribution and nothing else
    - usual: the estimator that `auto` stands for
    """

    whole: ClassVar[bool] = False
    measures: ClassVar[bool] = False
    sampled: ClassVar[bool] = False
    label: ClassVar[bool] = False
    pairs: ClassVar[bool] = False
    unshared: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    usual: ClassVar[Pathwise | ScoreFunction] = Pathwise()

    @property
    def question(self) -> "Full | Sampled | TopK | None":
        """Return the signal to ask of a teacher; None if no teacher is asked."""
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
        """Return the tokens of a step of the returns that it makes of raw logits; 0 without any."""
        return 0

    @property
    def outcome(self) -> AdvantageName | None:
        """Return the rule that makes an advantage of the verifier's reward.

        None if the reward has no part in the signal.
        """
        return None

    @property
    def by_reward(self) -> bool:
        """Return True if the verifier's reward decides which completions become likelier."""
        return self.outcome is not None

    def explain_refusal(self, capabilities: Capabilities) -> str | None:
        """Return why the scorer cannot give this signal, and what it can give; None if it can."""
        if self.question is None or self.question.type in capabilities.signals:
            return None
        return (
            f"cannot give signal {self.question.type!r}; it can give: "
            f"{', '.join(sorted(capabilities.signals))}"
            f"{capabilities.advice and '; ' + capabilities.advice}"
        )

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Return why the signal cannot go with an estimator, a divergence or a target, or None.

        `plain` is True if the target is the unmodified teacher.
        """
        return None


class Full(SignalCall):
    """Every log-probability of the teacher: exact, and if both heads are local, as cheap as one."""

    type: Literal["full"] = "full"
    spelled: ClassVar[bool] = False
    joined: ClassVar[bool] = False
    whole: ClassVar[bool] = True
    measures: ClassVar[bool] = True

    @property
    def question(self) -> "Full":
        """Return the signal itself."""
        return self


class Spelled(Full):
    """The same with how the teacher writes the tokens that it lacks; asked by `projected` alone."""

    spelled: ClassVar[bool] = True


class Joined(Full):
    """The same with the spans of several tokens; asked by `span_token` alone."""

    joined: ClassVar[bool] = True


class Sampled(SignalCall):
    """The teacher's log-probability of each token that the student sampled.

    `share` is what each token of a span gets of its log-ratio: `whole`, the exact gradient; `even`;
    or `surprise`, as the token's log-probability is to the span's (DPCA 2606.09456). The latter two
    are no gradients: see [another tokenizer](teachers.md#another-tokenizer).
    """

    type: Literal["sampled"] = "sampled"
    share: Literal["whole", "even", "surprise"] = "whole"
    sampled: ClassVar[bool] = True
    usual: ClassVar[Pathwise | ScoreFunction] = ScoreFunction()

    @property
    def question(self) -> "Sampled":
        """Return the signal without the share, which is no business of the teacher's."""
        return Sampled()

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse to differentiate a divergence that is known at one token only."""
        if self.share != "whole" and divergence != "reverse_kl":
            return (
                f"share {self.share!r} divides the log-ratio of a span among its tokens; write "
                "divergence: reverse_kl, or leave share out"
            )
        if not isinstance(gradient, Pathwise):
            return None
        return (
            "estimator 'pathwise' needs more than one token's log-probability; "
            "with signal 'sampled' write estimator: score_function"
        )


class TopK(SignalCall):
    """K candidates a token, chosen by `support`; `tail` decides about the mass outside them."""

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

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse a divergence that is no sum over the candidates that the tail leaves."""
        pathwise = isinstance(gradient, Pathwise)
        if self.tail == "drop" and pathwise and divergence != "ce":
            return (
                "a partial sum over candidates (tail 'drop') is no divergence: "
                "it can be negative and its gradient ignores the rest; "
                "write tail=bucket or tail=renorm, or divergence: ce"
            )
        if self.tail == "renorm_teacher" and not (pathwise and divergence in ("ce", "forward_kl")):
            return (
                "tail 'renorm_teacher' sums over the tokens that the truncated teacher may say, "
                "which leaves nothing out of ce and forward_kl alone; write divergence: "
                "forward_kl with estimator: pathwise, or tail=renorm"
            )
        return None


class Draws(SignalCall):
    """K extra tokens drawn from the student at each state, scored by the teacher.
    AsyncOPD 2606.24143.
    """

    type: Literal["mc"] = "mc"
    k: int = Field(default=16, ge=1)
    usual: ClassVar[Pathwise | ScoreFunction] = ScoreFunction()

    @property
    def question(self) -> Full:
        """Return the full distribution, from which the drawn tokens are scored."""
        return Full()

    @property
    def drawn(self) -> int:
        """Return k."""
        return self.k

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse every estimator but a score function."""
        if isinstance(gradient, ScoreFunction):
            return None
        return (
            "signal 'mc' has drawn tokens, which no divergence is a sum over; write estimator: "
            "score_function"
        )


class Logits(SignalCall):
    """The teacher's raw logits as values of tokens: returns in steps of K (KETCHUP 2504.19024).

    The return of a token is its logit minus the value of the state K tokens later, plus that token's
    logit minus the value K tokens after it, and so on; after the last token the value is 0. The
    `value` of a state is its largest logit (`max`) or the logarithm of their sum of exponentials
    (`soft`).
    """

    type: Literal["logits"] = "logits"
    k: int = Field(default=4, ge=1)
    value: Literal["max", "soft"] = "max"
    sampled: ClassVar[bool] = True
    usual: ClassVar[Pathwise | ScoreFunction] = ScoreFunction()

    @property
    def question(self) -> Full:
        """Return the full distribution, whose head gives the logits."""
        return Full()

    @property
    def step(self) -> int:
        """Return k."""
        return self.k

    def explain_refusal(self, capabilities: Capabilities) -> str | None:
        """Refuse also a teacher that gives log-probabilities only."""
        if problem := super().explain_refusal(capabilities):
            return problem
        if capabilities.raw_logits:
            return None
        return (
            "gives log-probabilities and no raw logits; write signal: sampled with estimator: "
            "score_function(gamma=1), or take a teacher of type model or self"
        )

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse settings of another return; a baseline of the group is none."""
        baselines = (ScoreFunction(), ScoreFunction(baseline="group_mean"))
        if divergence == "reverse_kl" and plain and gradient in baselines:
            return None
        return (
            "signal 'logits' has a return of its own; leave out target and divergence, and write "
            "estimator: score_function(baseline=group_mean) or none"
        )


class Text(SignalCall):
    """The rollout's own tokens are the label, whoever wrote them; no teacher is asked.
    SFT, SeqKD 1606.07947.
    """

    type: Literal["text"] = "text"
    label: ClassVar[bool] = True

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse everything but the cross-entropy of the label."""
        if divergence != "ce":
            return "signal 'text' has one label a token, the token itself; write divergence: ce"
        if not isinstance(gradient, Pathwise) or not plain:
            return (
                "signal 'text' is its own target and is differentiated itself; "
                "leave out target and estimator"
            )
        return None


class Score(SignalCall):
    """One reward a completion, from the verifier; no teacher is asked.

    `advantage`: group_normalized is GRPO, group_mean Dr. GRPO, leave_one_out RLOO, none REINFORCE.
    `among=source` compares only the completions of the term's source (HDPO 2603.23871). `per=turn`
    compares what follows each turn of a conversation: the environment's rewards from it on, and the
    completion's. `per=episode` compares their sum over the whole conversation.
    """

    type: Literal["score"] = "score"
    advantage: AdvantageName = "group_normalized"
    among: Literal["source"] | None = None
    per: Literal["rollout", "episode", "turn"] = "rollout"
    sampled: ClassVar[bool] = True
    usual: ClassVar[Pathwise | ScoreFunction] = ScoreFunction()

    @property
    def outcome(self) -> AdvantageName:
        """Return the advantage."""
        return self.advantage

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse settings that concern a teacher."""
        if not isinstance(gradient, ScoreFunction):
            return (
                "signal 'score' is a reward, not a function of the logits; write estimator: "
                "score_function"
            )
        if divergence != "reverse_kl" or not plain or gradient != ScoreFunction():
            return (
                "signal 'score' asks no teacher; leave out target, divergence and the estimator's "
                "arguments"
            )
        if self.per == "turn" and ADVANTAGES[self.advantage].anchored:
            return f"advantage {self.advantage!r} is of whole answers; leave out per=turn"
        return None


class Unlikely(SignalCall):
    """A fixed `advantage` for tokens that the student finds less likely than `threshold`.
    No teacher and no reward is asked: a control of what a teacher adds (2608.31046).
    """

    type: Literal["unlikely"] = "unlikely"
    threshold: float = Field(default=0.1, gt=0, lt=1)
    advantage: float = -1.0
    sampled: ClassVar[bool] = True
    usual: ClassVar[Pathwise | ScoreFunction] = ScoreFunction()

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse settings that concern a teacher."""
        if divergence == "reverse_kl" and plain and gradient == ScoreFunction():
            return None
        return (
            "signal 'unlikely' asks no teacher; leave out target, divergence and estimator, and "
            "write unlikely(0.1, -1)"
        )


class Entropy(SignalCall):
    """The student's entropy at each token, which the term raises; no teacher and no reward is asked.
    The bonus of equation 9 of PPO (1707.06347); its c2 is the coefficient.
    """

    type: Literal["entropy"] = "entropy"
    alone: ClassVar[bool] = True

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse settings that concern a teacher."""
        if divergence == "reverse_kl" and plain and gradient == Pathwise():
            return None
        return (
            "signal 'entropy' asks no teacher and is differentiated itself; leave out target, "
            "divergence and estimator"
        )


class Pair(SignalCall):
    """Pairs of a prompt's completions, of which one is chosen and the other rejected.

    `loss`: dpo 2305.18290, ipo and ipo_sum 2310.12036, simpo 2405.14734, orpo 2403.07691, spin
    2401.01335; `against` has the model of the ratio for all but simpo and orpo. `choose` prefers, by
    source, completions of dataset and teacher to completions of student and reference; by reward, the
    higher reward; by low_reward, the lower reward (AlignDistil 2503.02832); by score, the higher mean
    log-probability under the model of `against`.
    """

    type: Literal["pair"] = "pair"
    loss: Literal["dpo", "ipo", "ipo_sum", "simpo", "orpo", "spin"] = "dpo"
    beta: float | None = Field(default=None, gt=0)
    choose: Literal["source", "reward", "low_reward", "score"] = "source"
    margin: float | None = Field(default=None, ge=0)
    pairs: ClassVar[bool] = True
    usual: ClassVar[Pathwise | ScoreFunction] = ScoreFunction()

    @model_validator(mode="after")
    def _check_parameters(self) -> "Pair":
        self.entry.resolve(self.beta, self.margin)
        return self

    @property
    def entry(self) -> PairLoss:
        """Return the loss with its facts."""
        return PAIR_LOSSES[self.loss]

    @property
    def question(self) -> Sampled | None:
        """Return the log-probabilities of the tokens, if the loss or the choice needs them."""
        return Sampled() if self.entry.needs_reference or self.choose == "score" else None

    def explain_refusal(self, capabilities: Capabilities) -> str | None:
        """Refuse also several members with a loss each: a pair has one ratio."""
        if problem := super().explain_refusal(capabilities):
            return problem
        if not capabilities.splits_answers:
            return None
        return (
            "adds up the losses of its members, and a loss of pairs is no sum over teachers; write "
            "kind: geometric in the pool, whose log-probability is the members' mean"
        )

    @property
    def by_reward(self) -> bool:
        """Return True if the reward chooses."""
        return self.choose in ("reward", "low_reward")

    def explain_conflict(self, gradient: Gradient, divergence: str, plain: bool) -> str | None:
        """Refuse settings that concern one completion at a time."""
        if divergence == "reverse_kl" and plain and gradient == ScoreFunction():
            return None
        return (
            "signal 'pair' has a loss of its own; leave out target, divergence and estimator, and "
            f"write pair(LOSS) with LOSS one of {', '.join(PAIR_LOSSES)}"
        )
