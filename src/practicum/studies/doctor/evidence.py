"""The measurements that all checks share: student rollouts, both models' scores of them, and
teacher rollouts.

Everything is sampled and scored once. The teacher samples with the student's random streams.
Equal models therefore give equal completions, and a gap between other models shows with fewer of
them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from practicum.core.randomness import seed_of
from practicum.errors import TeacherError, VocabularyError
from practicum.losses import compare_signals
from practicum.losses.passes import build_score_requests
from practicum.objective import Full, Sampled, Signal, Term, TopK
from practicum.ports import Teacher, TeacherRequest, walk
from practicum.ports.notes import NoteMoment
from practicum.recipe import Recipe
from practicum.rollouts import (
    RolloutBatch,
    add_notes,
    add_rewards,
    as_environment,
    sample_rollouts,
    select_prompts,
)
from practicum.runs.assembly import RunComponents
from practicum.runs.scoring import ScorerInfo
from practicum.statistics import Interval, cluster_bootstrap, group_pairs, wilson
from practicum.studies.doctor.measurements import (
    CANDIDATES,
    CHUNK_TOKENS,
    STREAM,
    RolloutMeasurement,
    Target,
    measure_rollouts,
)
from practicum.teachers.translated import Config as TranslatedConfig
from practicum.text import Renderer, map_vocabularies
from practicum.text.translation import Translator
from practicum.training.loop import StepPlan, assemble
from practicum.types import Prompt, Rollout, Sample, TeacherSignal

log = logging.getLogger(__name__)

Measured = TypeVar("Measured")
Measure = Callable[[RolloutMeasurement], Measured | None]
"""A function of one rollout's measurements; None if a needed measurement is missing."""

PARITY_PROMPTS = 4
"""Prompts for which the teacher samples if there are no rewards to compare."""


@dataclass(frozen=True, slots=True)
class ParitySample:
    """One teacher completion with its T log-probabilities, as sampled and as scored."""

    prompt_id: str
    sampled: Float[Tensor, " T"]
    scored: Float[Tensor, " T"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The input of every check.

    `answers` are the teacher's rollouts, with rewards. `template_logprobs` are the teacher's
    log-probabilities of the student's rollouts after prompts in the student's template.
    `scoring_error` is the reason why the teacher could not score; empty if it could.
    """

    recipe: Recipe
    components: RunComponents
    plan: StepPlan
    prompts: list[Prompt]
    samples: int
    measurements: list[RolloutMeasurement]
    answers: list[Rollout] | None = None
    parity_samples: list[ParitySample] = field(default_factory=list)
    template_logprobs: list[Tensor] | None = None
    scoring_error: str = ""

    @property
    def seed(self) -> int:
        """The recipe's seed."""
        return self.recipe.seed

    @property
    def renderer(self) -> Renderer:
        """The student's renderer."""
        return self.components.student.renderer

    @property
    def teacher(self) -> Teacher:
        """The teacher of the recipe."""
        return self.components.parts.teacher

    @property
    def rollouts(self) -> list[Rollout]:
        """The student's rollouts."""
        return [measurement.rollout for measurement in self.measurements]

    @property
    def scorers(self) -> list[ScorerInfo]:
        """The models behind the teacher, without the models behind the reference."""
        return [scorer for scorer in self.components.scorers if scorer.name.startswith("teacher")]

    @property
    def teacher_stops(self) -> frozenset[int]:
        """The stop token ids of the models behind the teacher.

        The student's stop token ids if the teacher uses the student's weights.
        """
        if self.translators:
            # The teacher's token ids differ; its stop is requested in place of the student's.
            return self.renderer.stop_ids
        stops = [scorer.renderer.stop_ids for scorer in self.scorers]
        return frozenset().union(*stops) if stops else self.renderer.stop_ids

    @property
    def translators(self) -> list[Translator]:
        """The translators to the models behind the teacher that use another tokenizer."""
        stops = [
            config.stop
            for _, config in walk(self.recipe.teacher)
            if isinstance(config, TranslatedConfig)
        ]
        renderers = [scorer.renderer for scorer in self.scorers if _contradicts(self, scorer)]
        return [
            Translator(self.renderer, renderer, stop, credit="span")
            for renderer, stop in zip(renderers, stops, strict=False)
        ]

    @property
    def no_signal_reason(self) -> str | None:
        """The reason why the teacher gave no signal, or None if it gave one."""
        if any(measurement.teacher_logprobs is not None for measurement in self.measurements):
            return None
        if not self.teacher.capabilities.signals:
            return "the recipe has no teacher that scores"
        return self.scoring_error or "the teacher returned no scores for these rollouts"

    def group_by_prompt(self, measure: Measure[Tensor]) -> list[Tensor]:
        """Return the values of a measure, joined by prompt; rollouts without any are left out."""
        pairs = [(row.rollout.prompt.id, measure(row)) for row in self.measurements]
        non_empty = [
            (key, values.double()) for key, values in pairs if values is not None and len(values)
        ]
        return [torch.cat(group) for group in group_pairs(non_empty).values()]

    def estimate_mean(self, measure: Measure[Tensor]) -> Interval | None:
        """Return a measure's mean over tokens, with a bootstrap interval over prompts.

        None without values.
        """
        # Tokens of one completion are alike, so resampling tokens would give far too narrow
        # intervals.
        groups = self.group_by_prompt(measure)
        return cluster_bootstrap(groups, self.seed) if groups else None

    def estimate_rollout_mean(self, measure: Measure[float]) -> Interval | None:
        """Return the mean of one number per rollout, with a bootstrap interval over prompts."""

        def wrap_number(row: RolloutMeasurement) -> Tensor | None:
            number = measure(row)
            return None if number is None else torch.tensor([float(number)])

        return self.estimate_mean(wrap_number)

    def estimate_share(self, holds: Callable[[Rollout], bool]) -> Interval | None:
        """Return the share of rollouts that meet a condition, with an interval over prompts."""
        share = self.estimate_rollout_mean(lambda row: float(holds(row.rollout)))
        if share is None or share.low < share.high:
            return share
        # All or none: the bootstrap has no width, but so few prompts leave some uncertainty.
        return wilson(share.mean * len(self.prompts), len(self.prompts))

    def group_rewards(self, rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
        """Return the rewards of rollouts by prompt id; empty if the task gives none."""
        pairs = [(rollout.prompt.id, rollout.reward) for rollout in rollouts]
        return group_pairs((key, reward) for key, reward in pairs if reward is not None)


def _contradicts(evidence: Evidence, scorer: ScorerInfo) -> bool:
    """Return True if a model behind the teacher has a vocabulary that contradicts the student's."""
    try:
        map_vocabularies(evidence.renderer.tokenizer, scorer.renderer.tokenizer)
    except VocabularyError:
        return True
    return False


def collect_evidence(
    recipe: Recipe, components: RunComponents, count: int, samples: int
) -> Evidence:
    """Sample `samples` rollouts for each of `count` prompts with the settings of step 1, and score
    them.

    Raises RecipeError, before anything is sampled, if the student's weights are not in this
    process.
    """
    # P19 needs these weights; the access raises before anything is sampled.
    _ = components.weights
    plan, parts = components.settings.plan(1), components.parts
    prompts = select_prompts(parts.prompts, recipe.seed, 1, min(count, len(parts.prompts)))
    client = parts.sampler
    log.info(f"the student answers {len(prompts)} prompts {samples} times")
    batch = RolloutBatch(prompts, samples, recipe.seed, step=1, stream=STREAM)
    environment = as_environment(parts.task, parts.renderer)
    rollouts = add_rewards(
        sample_rollouts(batch, client, parts.renderer, plan.sampling, environment), parts.task
    )
    rollouts = add_notes(rollouts, parts.notes, NoteMoment(1, client))
    signals, error = _score_rollouts(parts.teacher, rollouts, _choose_signal(parts.teacher))
    term, candidates = find_term(plan), None
    if not error and term is not None and _needs_candidates(parts.teacher, term):
        candidates, error = _score_rollouts(parts.teacher, rollouts, term.signal)
    target = _find_target(components, plan, rollouts, None if error else candidates)
    references = [] if target is None else [signal for signal in target.references if signal]
    evidence = Evidence(recipe, components, plan, prompts, samples, [], scoring_error=error)
    log.info("student and teacher are compared token by token")
    measurements = measure_rollouts(
        rollouts,
        client.score(build_score_requests(rollouts), Full()),
        signals,
        (evidence.renderer.stop_ids, evidence.teacher_stops & evidence.renderer.token_ids),
        target,
    )
    # Rollouts share heads, and a teacher on disk holds its head until it is released.
    for head in {
        head.key: head for signal in [*signals, *references] for head in signal.heads
    }.values():
        head.release()
    evidence = replace(evidence, measurements=measurements)
    if error:
        return evidence
    answers, parity = _sample_teacher(evidence)
    template = _score_with_student_template(evidence)
    return replace(evidence, answers=answers, parity_samples=parity, template_logprobs=template)


def _find_target(
    components: RunComponents,
    plan: StepPlan,
    rollouts: list[Rollout],
    candidates: Sequence[TeacherSignal] | None,
) -> Target | None:
    """Return the target of the first term about the teacher, with the further signals that it needs."""
    term = find_term(plan)
    if term is None:
        return None
    reference = components.parts.reference
    nothing: Sequence[TeacherSignal | None] = [None] * len(rollouts)
    references = nothing
    has_reference = reference is not None and "full" in reference.capabilities.signals
    if reference is not None and term.needs_reference and has_reference:
        references = reference.score(rollouts, Full())
    return Target(term, references, candidates or nothing)


def _needs_candidates(teacher: Teacher, term: Term) -> bool:
    """Return True if only the question of the loss gives the candidates that it compares."""
    return isinstance(term.signal, TopK) and "full" not in teacher.capabilities.signals


def find_term(plan: StepPlan) -> Term | None:
    """Return the term to measure: the first one about the teacher."""
    return next((term for term in plan.objective.losses if term.needs_teacher), None)


def _score_rollouts(
    teacher: Teacher, rollouts: list[Rollout], kind: Signal | None
) -> tuple[list[TeacherSignal], str]:
    """Return the teacher's signals of a kind.

    On an error, or without a teacher that scores, empty ones and the error.
    """
    no_signals = [TeacherSignal() for _ in rollouts]
    if kind is None:
        return no_signals, ""
    log.info(f"the teacher scores {len(rollouts)} rollouts")
    try:
        signals = teacher.score(rollouts, kind)
        assemble(rollouts, signals)  # raises TeacherError if the signals do not fit the rollouts
    except TeacherError as error:
        return no_signals, str(error)
    return signals, ""


def _choose_signal(teacher: Teacher) -> Signal | None:
    """Return the most informative signal that the teacher can give, or None if it cannot score."""
    can = teacher.capabilities
    if "full" in can.signals:
        return Full()
    if "topk" in can.signals:
        support = "teacher" if "teacher" in can.supports else "student"
        return TopK(k=min(CANDIDATES, can.largest_k or CANDIDATES), support=support)
    return Sampled() if "sampled" in can.signals else None


def _sample_teacher(evidence: Evidence) -> tuple[list[Rollout] | None, list[ParitySample]]:
    """Sample the teacher on the same prompts.

    Returns its rollouts if there are rewards to compare, and parity samples.
    """
    task, rollouts = evidence.components.parts.task, evidence.rollouts
    has_rewards = any(rollout.reward is not None for rollout in rollouts)
    if not has_rewards:
        rollouts = rollouts[: PARITY_PROMPTS * evidence.samples : evidence.samples]
    # The student's seeds: with common random numbers the gap is a paired difference of little
    # variance.
    requests = [
        TeacherRequest(
            rollout.prompt, seed_of(evidence.seed, STREAM, 1, rollout.prompt.id, rollout.sample)
        )
        for rollout in rollouts
    ]
    stops = evidence.plan.sampling.stop_ids | evidence.teacher_stops
    if evidence.teacher.capabilities.writes:
        log.info(f"the teacher answers {len(requests)} times")
    samples = evidence.teacher.sample(requests, replace(evidence.plan.sampling, stop_ids=stops))
    if samples is None:
        return None, []
    answers = [
        _build_teacher_rollout(evidence, rollout, sample)
        for rollout, sample in zip(rollouts, samples, strict=True)
    ]
    parity_samples = _score_parity_samples(evidence.teacher, answers)
    return (add_rewards(answers, task) if has_rewards else None), parity_samples


def _build_teacher_rollout(evidence: Evidence, twin: Rollout, sample: Sample) -> Rollout:
    """Return the teacher's sample as a rollout, in the place of the student's rollout `twin`."""
    return replace(
        twin,
        tokens=sample.tokens,
        loss_mask=torch.ones_like(sample.tokens, dtype=torch.bool),
        sampling_logprobs=sample.sampling_logprobs,
        policy_logprobs=sample.policy_logprobs,
        stop_reason=sample.stop_reason,
        text=evidence.components.parts.renderer.decode(sample.tokens.tolist()),
        reward=None,
        source="teacher",
        authors=None,
        turns=(),
        notes={},
    )


def _score_parity_samples(teacher: Teacher, answers: Sequence[Rollout]) -> list[ParitySample]:
    """Score a few of the teacher's own completions with the teacher, spread over the prompts."""
    stride = max(len(answers) // (2 * PARITY_PROMPTS), 1)
    # Re-tokenized answers have no log-probabilities to compare with.
    rescored = [
        answer
        for answer in answers[::stride]
        if len(answer.tokens) and not answer.policy_logprobs.isnan().all()
    ]
    parity_samples = []
    for answer, signal in zip(rescored, teacher.score(rescored, Sampled()), strict=True):
        pair, measures = (TeacherSignal(), signal), ("teacher_logprobs",)
        scored = compare_signals(pair, answer.tokens, CHUNK_TOKENS, measures).teacher_logprobs
        if scored is not None:
            sampled = answer.policy_logprobs
            parity_samples.append(ParitySample(answer.prompt.id, sampled, scored.cpu()))
    return parity_samples


def _score_with_student_template(evidence: Evidence) -> list[Tensor] | None:
    """Return the teacher's log-probabilities after prompts in the student's template.

    None if the templates agree.
    """
    # Only a plain model is compared: wrapping teachers change the prompt on purpose.
    if evidence.recipe.teacher.type != "model":
        return None
    rollouts = evidence.rollouts
    clients = [evidence.teacher.bind_prompt(rollout.prompt) for rollout in rollouts]
    is_same = all(
        client is None or client.prompt_tokens == rollout.prompt_tokens
        for client, rollout in zip(clients, rollouts, strict=True)
    )
    if is_same or clients[0] is None:
        return None
    signals = clients[0].client.score(build_score_requests(rollouts), Sampled())
    return [signal.logprobs for signal in signals if signal.logprobs is not None]
