"""Define the objective as data: terms, each a choice on the mathematical axes, and an aggregate."""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from practicum.functional.advantages import ADVANTAGES, REWARDS, RewardRule
from practicum.functional.divergences import DIVERGENCES
from practicum.functional.estimators import CORRECTIONS
from practicum.functional.samples import SAMPLE_WEIGHTS, TOKEN_STATISTICS
from practicum.functional.sequence import AGGREGATES
from practicum.functional.weights import RANK_STATISTICS, TEACHER_STATISTICS, WEIGHTS
from practicum.objective.choices import (
    CorrectionChoice,
    DivergenceChoice,
    RewardChoice,
    SampleWeightChoice,
    WeightChoice,
)
from practicum.objective.clip_call import Clip
from practicum.objective.clips.none import Config as NoClip
from practicum.objective.distribution import SignalComparison, TeacherDistribution
from practicum.objective.entries import Choice
from practicum.objective.estimator_call import Auto, Estimator, EstimatorCall
from practicum.objective.signal_call import Capabilities, Full, Sampled, Signal, SignalCall, TopK
from practicum.objective.target_call import Target
from practicum.objective.targets.teacher import Config as TeacherTarget
from practicum.types import Datum, FrozenConfig

VERIFIER = "verifier"
"""The task itself as a scorer: its reward needs no entry in the recipe's scorers."""

OTHER_ANSWERS = {
    "correct": "incorrect",
    "incorrect": "correct",
    "failed_group": "solved_group",
    "solved_group": "failed_group",
}
"""The filters by outcome, each with the filter that selects the complementary completions."""


class Term(BaseModel):
    """One term of the loss: rollouts, a signal, and the way from disagreement to a gradient."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    signal: Signal = Full()
    against: Literal["teacher", "reference"] = Field(
        default="teacher", description="the model that the term is about"
    )
    target: Target = TeacherTarget()
    divergence: DivergenceChoice = Choice(name="reverse_kl")
    estimator: Estimator = Auto()
    correction: CorrectionChoice = Choice(name="none")
    advantage_logprob: Literal["learner", "sampler"] = "learner"
    reward: RewardChoice = Field(
        default=Choice(name="none"),
        description="how the reward joins a sampled token's advantage",
    )
    scorer: str = Field(
        default=VERIFIER,
        description="the scorer of the rewards that the term learns from, compares or filters by: "
        "`verifier`, or a name in [scorers](scorers.md)",
    )
    clip: Clip = Field(default=NoClip(), description="the part of the loss that is clipped")
    weights: WeightChoice = Choice(name="all")
    samples: SampleWeightChoice = Field(
        default=Choice(name="uniform"),
        description="how much each completion counts: see [weights](weights.md#samples)",
    )
    filter: Literal["all", "correct", "incorrect", "failed_group", "solved_group"] = Field(
        default="all",
        description=(
            "only completions with reward 1 or below 1, or of prompts without or with a right answer"
        ),
    )
    source: Literal["all", "student", "dataset", "teacher", "reference", "environment"] = Field(
        default="all",
        description="only tokens of this writer: see [rollouts](rollouts.md); `all` excludes "
        "tokens of an environment",
    )
    context: Literal["student", "teacher"] = Field(
        default="student",
        description="the prompt that the student reads: its own, or the teacher's with its "
        "privileged text",
    )
    coefficient: float = 1.0

    @model_validator(mode="after")
    def _check_consistency(self) -> "Term":
        problem = (
            self.signal.explain_conflict(self.gradient, self.divergence.name, self.targets_teacher)
            or self._check_sampled_token()
            or self._check_target()
            or self._check_rewards_and_clips()
            or self._check_weights()
            or self._check_pairs()
            or self._check_observed()
        )
        if problem is not None:
            raise ValueError(problem)
        return self

    def _check_sampled_token(self) -> str | None:
        entry = DIVERGENCES[self.divergence.name]
        if not entry.pointwise and not self.gradient.pathwise:
            return (
                f"divergence {self.divergence.name!r} has no sampled-token form; "
                "use signal full with estimator pathwise, or a divergence that has one, "
                "such as reverse_kl or jsd(0.5)"
            )
        if self.gradient.subtracts == "kl" and not self.signal.measures:
            return f"baseline 'kl' needs signal full or topk, not {self.signal.name!r}"
        return self.gradient.explain_misuse(self.divergence.name, self.signal.candidates)

    @property
    def targets_teacher(self) -> bool:
        """Return True if the target is the unmodified teacher."""
        return self.target.is_plain

    def _check_target(self) -> str | None:
        if self.targets_teacher or self.signal.whole:
            return None
        is_reverse_kl = self.signal.sampled and self.divergence.name == "reverse_kl"
        if is_reverse_kl and self.target.is_product:
            # The normaliser depends only on the state, so its score function has expectation 0.
            return None
        return (
            f"target {self.target.name!r} must be renormalised over the whole vocabulary; "
            "set signal: full"
        )

    def _check_rewards_and_clips(self) -> str | None:
        if problem := self.signal.explain_extras(
            has_reward=self.has_reward,
            clip=self.clip.name,
            source=self.source,
        ):
            return problem
        if self.signal.step and self.reward_rule.reads_log_ratio:
            return f"reward {self.reward.name!r} reads log T - log S; set signal: sampled"
        if self.signal.step and self.clip.part == "advantage":
            return "clip 'advantage' is of log T - log S; leave it out with signal 'logits'"
        if self.signal.pairs and self.has_reward:
            return "signal 'pair' has no advantage; leave out reward, or write choose=reward"
        if self.signal.outcome is not None and self.has_reward:
            return (
                f"signal {self.signal.name!r} is the reward itself; leave out reward, "
                "or use a teacher's signal with it"
            )
        if self.has_reward and not self.on_sampled_token:
            return (
                f"reward {self.reward.name!r} is added to an advantage; set estimator: "
                "score_function"
            )
        if self.clip.part == "divergence" and not (self.needs_signal and self.gradient.pathwise):
            return (
                f"clip {self.clip.name!r} is for a divergence that is differentiated; "
                "for an advantage write clip: advantage(-5, 5)"
            )
        if self.clip.part == "advantage" and not self.has_advantages:
            return "clip 'advantage' is for tokens' advantages; for a divergence write clip: loss(0.05)"
        return None

    def _check_weights(self) -> str | None:
        if self.weighs_by & RANK_STATISTICS and not self.signal.whole:
            return f"weights {self.weights.name!r} ranks the whole vocabulary; set signal: full"
        if not self.needs_signal and self.weighs_by_teacher:
            return (
                f"weights {self.weights.name!r} needs a teacher, and signal {self.signal.name!r} "
                "uses none"
            )
        if not self.needs_signal and self.samples_by_teacher:
            return (
                f"samples {self.samples.name!r} needs a teacher, and signal {self.signal.name!r} "
                "uses none"
            )
        return None

    def _check_pairs(self) -> str | None:
        if not self.signal.pairs:
            return None
        defaults = Term.model_fields
        of_one_answer = (
            "correction",
            "weights",
            "samples",
            "filter",
            "source",
            "advantage_logprob",
        )
        chosen = [name for name in of_one_answer if getattr(self, name) != defaults[name].default]
        if not chosen:
            return None
        return (
            f"signal 'pair' takes whole answers of a prompt unchanged; leave out "
            f"{' and '.join(chosen)}"
        )

    def _check_observed(self) -> str | None:
        if not self.observes:
            return None
        if self.on_sampled_token or self.signal.pairs:
            return (
                "source 'environment' trains on tokens that no policy sampled, which have no advantage; "
                "set signal: text, divergence: ce, or another term with estimator: pathwise"
            )
        if self.context == "teacher":
            return "source 'environment' is read after the student's own prompt; leave context out"
        if self.samples.name != "uniform":
            return (
                f"samples {self.samples.name!r} compares the completions of a writer, and source is "
                "'environment'; leave samples out"
            )
        return None

    @property
    def observes(self) -> bool:
        """Return True if the term learns what an environment wrote."""
        return self.source == "environment"

    @property
    def view(self) -> tuple[bool, bool]:
        """Return True for a term in the teacher's context, and for an environment's tokens."""
        return self.context == "teacher", self.observes

    @property
    def parameter(self) -> float | None:
        """Return the parameter of the divergence, or None if it has none."""
        return next((float(value) for value in self.divergence.arguments.values()), None)

    def build_comparison(
        self, student: Tensor, teacher: TeacherDistribution, tokens: Tensor
    ) -> SignalComparison:
        """Build the input of the signal's own comparison at the same T tokens."""
        entry = DIVERGENCES[self.divergence.name]
        return SignalComparison(student, teacher, tokens, entry, self.parameter, self.against)

    def compute_advantage(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence's advantage of tokens with these log-probabilities."""
        return DIVERGENCES[self.divergence.name].advantage(student, teacher, self.parameter)

    def explain_refusal(self, capabilities: Capabilities) -> str | None:
        """Explain why the scorer cannot answer the term, and how to change the term, or return None."""
        if problem := self.signal.explain_refusal(capabilities):
            return problem
        name = self.divergence.name
        by_span = capabilities.by_span and isinstance(self.signal, Sampled)
        if not by_span or DIVERGENCES[name].f_divergence:
            return None
        # It depends on more than the ratio of the two probabilities, and spans only have this ratio.
        return (
            f"compares spans by the ratio of their probabilities, and {name!r} is not a function of "
            "it; set divergence: reverse_kl or another f-divergence"
        )

    @property
    def gradient(self) -> EstimatorCall:
        """Return the estimator, with `auto` resolved."""
        return self.estimator.resolve(self.signal.usual)

    @property
    def reward_rule(self) -> RewardRule:
        """Return the rule that joins the reward and the teacher."""
        return REWARDS[self.reward.name]

    @property
    def has_reward(self) -> bool:
        """Return True if the verifier's reward joins a teacher's advantage."""
        return bool(self.reward_rule.advantage)

    @property
    def reward_advantage(self) -> str:
        """Return the advantage of the reward that joins a teacher's advantage; empty without a reward."""
        return str(self.reward.arguments["advantage"]) if self.has_reward else ""

    @property
    def needs_signal(self) -> bool:
        """Return True if the term needs the signal of a teacher or of the reference."""
        return self.signal.question is not None

    @property
    def needs_teacher(self) -> bool:
        """Return True if the term needs the teacher's signal and not the reference's."""
        return self.needs_signal and self.against == "teacher"

    @property
    def weighs_by(self) -> frozenset[str]:
        """Return the statistics that the token weights need."""
        return WEIGHTS[self.weights.name].needed(self.weights.arguments)

    @property
    def weighs_by_teacher(self) -> bool:
        """Return True if the token weights need the teacher's signal."""
        return not self.weighs_by.isdisjoint(TEACHER_STATISTICS)

    @property
    def samples_by(self) -> frozenset[str]:
        """Return the statistics that the sample weights need."""
        return SAMPLE_WEIGHTS[self.samples.name].needed(self.samples.arguments)

    @property
    def samples_by_teacher(self) -> bool:
        """Return True if the sample weights need the teacher's signal."""
        return not self.samples_by.isdisjoint({"teacher_nll", "reference_nll"})

    @property
    def weighs_by_reference(self) -> bool:
        """Return True if the weights of tokens or completions need the signal of the reference."""
        return "reference_logprobs" in self.weighs_by or "reference_nll" in self.samples_by

    @property
    def has_rewarded_advantage(self) -> bool:
        """Return True if the verifier's reward is an advantage, a part of one, or chooses pairs."""
        return self.signal.by_reward or self.has_reward

    @property
    def compares_with_reference(self) -> bool:
        """Return True if the rewards of the reference's answers have a part in the advantage."""
        advantage = self.signal.outcome or self.reward_advantage
        return bool(advantage) and ADVANTAGES[advantage].anchored

    @property
    def learns_from_reward(self) -> bool:
        """Return True if the term trains on the verifier's reward.

        The reward is then an advantage, or selects the completions that become more likely.
        """
        chosen = self.filter in OTHER_ANSWERS or SAMPLE_WEIGHTS[self.samples.name].by_reward
        return self.has_rewarded_advantage or (self.signal.label and chosen)

    @property
    def needs_reference(self) -> bool:
        """Return True if the term needs the signal of the reference."""
        is_about_it = self.needs_signal and self.against == "reference"
        return self.target.needs_reference or self.weighs_by_reference or is_about_it

    @property
    def has_advantages(self) -> bool:
        """Return True if the sampled token or each candidate has an advantage."""
        return self.gradient.over_candidates or self.on_sampled_token

    @property
    def on_sampled_token(self) -> bool:
        """Return True if the loss is a coefficient times the sampled token's log-probability."""
        gradient = self.gradient
        return not (gradient.pathwise or gradient.over_candidates or self.signal.drawn)

    @property
    def needs_sequences(self) -> bool:
        """Return True if a token's coefficient depends on other tokens.

        The losses then need a first pass without gradient.
        """
        gradient = self.gradient
        # A return or a group's mean depends on other tokens, as do the products and sorted weights below.
        return (
            gradient.accumulates
            or gradient.subtracts == "group_mean"
            or self.signal.step > 0
            or self.signal.pairs
            or CORRECTIONS[self.correction.name].cumulative
            or not WEIGHTS[self.weights.name].pointwise
            or not self.samples_by.isdisjoint(TOKEN_STATISTICS)
        )


class Objective(FrozenConfig):
    """The full loss: terms that are summed, and the aggregate that turns tokens into one number."""

    losses: tuple[Term, ...] = (Term(),)
    aggregate: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"
    ] = "token_mean"
    aggregate_norm: float | None = Field(
        default=None, gt=0, description="L of seq_mean_token_sum_norm"
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_single_term(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping) or "losses" in raw:
            return raw
        shared = {key: raw[key] for key in ("aggregate", "aggregate_norm") if key in raw}
        term = {key: setting for key, setting in raw.items() if key not in shared}
        return {"losses": [term], **shared}

    @model_validator(mode="after")
    def _complete(self) -> "Objective":
        if not self.losses:
            raise ValueError(
                "losses is empty; leave it out for the default, or write at least one term"
            )
        if self.aggregate == "seq_mean_token_sum_norm" and self.aggregate_norm is None:
            raise ValueError(
                "aggregate 'seq_mean_token_sum_norm' needs aggregate_norm, "
                "for example the token limit"
            )
        if self.aggregate != "seq_mean_token_sum_norm" and self.aggregate_norm is not None:
            raise ValueError(
                "aggregate_norm is only used by aggregate 'seq_mean_token_sum_norm', "
                f"not by {self.aggregate!r}; leave it out or change the aggregate"
            )
        is_sampled = self.signal is not None and self.signal.sampled
        for term in self.losses:
            if is_sampled and "teacher_entropy" in term.weighs_by:
                raise ValueError(
                    f"weights {term.weights.name!r} needs the teacher's entropy, which signal "
                    "'sampled' does not tell; set signal: full, or weights of another statistic"
                )
        return self

    def split_by(self, fact: Callable[[Term], Any]) -> "dict[Any, Objective]":
        """Return the terms with each value of a fact, in the order of the values."""
        groups = groupby(sorted(self.losses, key=fact), key=fact)
        return {key: self.model_copy(update={"losses": tuple(part)}) for key, part in groups}

    @property
    def signal(self) -> Full | Sampled | TopK | None:
        """Return the richest signal that any term asks of the teacher; None if no term asks it."""
        return _pick_richest([term for term in self.losses if term.needs_teacher])

    @property
    def reference_signal(self) -> Full | Sampled | TopK | None:
        """Return the richest signal that any term asks of the reference; None if no term does."""
        return _pick_richest([term for term in self.losses if term.needs_reference])

    @property
    def needs_logits(self) -> bool:
        """Return True if any term reads a model's raw logits."""
        return any(term.signal.step for term in self.losses)

    @property
    def needs_own(self) -> bool:
        """Return True if any term reads the tokens of a teacher that the student lacks."""
        return any(term.signal.unshared for term in self.losses)

    @property
    def learning(self) -> SignalCall | None:
        """Return the first signal that has its own weights, which train together with the student's."""
        signals = (term.signal for term in self.losses)
        return next((signal for signal in signals if signal.maps_pace is not None), None)

    @property
    def needs_sequences(self) -> bool:
        """Return True if any term needs the first pass without gradient."""
        return any(term.needs_sequences for term in self.losses)

    def needs_first_pass(self, datums: Iterable[Datum]) -> bool:
        """Return True if a token's coefficient depends on other tokens, so that a pass comes first.

        Such coefficients come from the objective's returns and weights, or from a teacher's spans.
        """
        return self.needs_sequences or any(datum.shared_starts is not None for datum in datums)


def _pick_richest(terms: list[Term]) -> Full | Sampled | TopK | None:
    """Return the signal that answers all of the terms."""
    # The full distribution contains every top-k table, and a longer table every shorter one.
    questions = [question for term in terms if (question := term.signal.question) is not None]
    return max(questions, key=_measure_richness, default=None)


def _measure_richness(question: Full | Sampled | TopK) -> tuple[bool, bool, int]:
    # An answer with additional columns contains the plain answer, and takes longer to prepare.
    has_more = isinstance(question, Full) and question.reads_more
    return question.whole, has_more, question.candidates


_aggregate = Objective.model_fields["aggregate"].annotation
assert set(AGGREGATES) == set(_aggregate.__args__)  # type: ignore[union-attr]
