"""What the checks look at: a few student rollouts of the recipe, scored by student and teacher, and the teacher's own answers.

Everything is drawn and scored once. The teacher answers with the same random streams as the student, so that two equal
models give equal answers and a gap between others is seen with fewer of them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from practicum import functional as F
from practicum.core.randomness import seed_of
from practicum.errors import TeacherError
from practicum.functional.chunked import chunks
from practicum.functional.comparison import compare
from practicum.functional.distributions import overlap_of_top
from practicum.functional.head import Head
from practicum.functional.pools import reverse_kl_gradient
from practicum.objective import Full, Sampled, Signal, TopK, compare_signals, read_tokens
from practicum.objective.tokens import TeacherDistribution
from practicum.ports import SamplingClient, Teacher, TeacherRequest
from practicum.recipe import Recipe
from practicum.rollouts import (
    RolloutBatch,
    add_rewards,
    as_environment,
    sample_rollouts,
    select_prompts,
)
from practicum.runs.assembly import RunComponents, ScorerInfo
from practicum.statistics import Interval, cluster_bootstrap, group_pairs, wilson
from practicum.training.loop import StepPlan, assemble
from practicum.types import Prompt, Rollout, Sample, ScoreRequest, TeacherSignal

log = logging.getLogger(__name__)

STREAM = "doctor"
CANDIDATES = 16
"""The k of the overlap (arXiv 2604.13016)."""

FEWEST_TOKENS = 4 * CANDIDATES
"""In a smaller vocabulary the k likeliest tokens are too much of it to say anything."""

ALONE = ("student_logprobs", "teacher_logprobs", "student_entropy", "teacher_entropy")
SHARED = ("overlap", "student_mass", "teacher_mass")

RANK = 16
CANARIES = 4
"""So many prompts' answers of the teacher are scored again when they are not needed for the gap."""


CHUNK_TOKENS = 128
"""Tokens whose whole distributions are compared at once."""


@dataclass(frozen=True, slots=True)
class RolloutMeasurement:
    """What was measured at each of the T tokens of one student rollout; None where the teacher does not tell.

    `logprobs` are the learner's. `judged` is the teacher's log-probability of the sampled token and `advantage` how much it
    exceeds the student's, where a stop token stands for any stop token of either model. `divergence` is KL(S || T): exact, a
    lower bound from the teacher's candidates and one tail, or the log-ratio of the sampled token. `student_stop` and
    `teacher_stop` are log-probabilities of any stop token of either model. `coherence` is |sum of the tokens' gradients| over
    the sum of their norms, `control` the same for a teacher that is the student with a random adapter on its head, equally
    far away.
    """

    rollout: Rollout
    logprobs: Float[Tensor, " T"]
    student_entropy: Float[Tensor, " T"]
    student_stop: Float[Tensor, " T"]
    teacher_logprobs: Float[Tensor, " T"] | None = None
    judged: Float[Tensor, " T"] | None = None
    advantage: Float[Tensor, " T"] | None = None
    divergence: Float[Tensor, " T"] | None = None
    teacher_entropy: Float[Tensor, " T"] | None = None
    teacher_stop: Float[Tensor, " T"] | None = None
    overlap: Float[Tensor, " T"] | None = None
    student_mass: Float[Tensor, " T"] | None = None
    teacher_mass: Float[Tensor, " T"] | None = None
    coherence: float | None = None
    control: float | None = None


@dataclass(frozen=True, slots=True)
class ParitySample:
    """One answer of the teacher's own: its log-probabilities as it was written, and as it is scored."""

    prompt: str
    written: Float[Tensor, " T"]
    scored: Float[Tensor, " T"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that the checks look at. `trouble` is why the teacher could not score the rollouts, where it could not."""

    recipe: Recipe
    built: RunComponents
    plan: StepPlan
    prompts: list[Prompt]
    samples: int
    traces: list[RolloutMeasurement]
    answers: list[Rollout] | None = None
    canaries: list[ParitySample] = field(default_factory=list)
    other_template: list[Tensor] | None = None
    trouble: str = ""

    @property
    def seed(self) -> int:
        """The recipe's."""
        return self.recipe.seed

    @property
    def rollouts(self) -> list[Rollout]:
        """The student's rollouts."""
        return [trace.rollout for trace in self.traces]

    @property
    def scorers(self) -> list[ScorerInfo]:
        """The models behind the teacher, without those behind the reference."""
        return [scorer for scorer in self.built.scorers if scorer.name.startswith("teacher")]

    @property
    def teacher_stops(self) -> frozenset[int]:
        """The stop tokens of the models behind the teacher; the student's own where its weights teach."""
        stops = [scorer.renderer.stop_ids for scorer in self.scorers]
        return frozenset().union(*stops) if stops else self.built.learner.renderer.stop_ids

    @property
    def silent(self) -> str | None:
        """Why nothing is known about the teacher, or None where it spoke."""
        if any(trace.teacher_logprobs is not None for trace in self.traces):
            return None
        if not self.built.parts.teacher.capabilities.signals:
            return "the recipe has no teacher that scores"
        return self.trouble or "the teacher said nothing about these rollouts"

    @property
    def whole(self) -> bool:
        """Whether the teacher's whole distribution is known."""
        return any(trace.teacher_entropy is not None for trace in self.traces)

    def by_prompt(self, values: Callable[[RolloutMeasurement], Tensor | None]) -> list[Tensor]:
        """Some tokens' values of all rollouts that have them, together by prompt."""
        pairs = [(trace.rollout.prompt.id, values(trace)) for trace in self.traces]
        groups = group_pairs(
            (prompt, found.double()) for prompt, found in pairs if found is not None and len(found)
        )
        return [torch.cat(group) for group in groups.values()]

    def mean(self, values: Callable[[RolloutMeasurement], Tensor | None]) -> Interval | None:
        """The mean over tokens with an interval by bootstrap over prompts; None where nothing is known."""
        groups = self.by_prompt(values)
        return cluster_bootstrap(groups, self.seed) if groups else None

    def mean_of_rollouts(
        self, value: Callable[[RolloutMeasurement], float | None]
    ) -> Interval | None:
        """The mean of one number a rollout, the interval over prompts again."""

        def one(trace: RolloutMeasurement) -> Tensor | None:
            found = value(trace)
            return None if found is None else torch.tensor([float(found)])

        return self.mean(one)

    def share(self, holds: Callable[[Rollout], bool]) -> Interval | None:
        """The share of rollouts of which something holds; of all or none, as uncertain as so many prompts leave it."""
        found = self.mean_of_rollouts(lambda trace: float(holds(trace.rollout)))
        if found is None or found.low < found.high:
            return found
        return wilson(found.mean * len(self.prompts), len(self.prompts))

    def scores(self, rollouts: Sequence[Rollout]) -> dict[str, list[float]]:
        """The rewards of some rollouts by prompt; empty where the task has none."""
        return group_pairs(
            (rollout.prompt.id, rollout.reward)
            for rollout in rollouts
            if rollout.reward is not None
        )


def collect_evidence(recipe: Recipe, built: RunComponents, count: int, samples: int) -> Evidence:
    """Draw `samples` rollouts for each of `count` prompts at the settings of the recipe's first step, and score them.

    Raises RecipeError, before anything is drawn, where the student's weights are not in this process.
    """
    _ = built.weights
    plan, parts = built.settings.plan(1), built.parts
    prompts = select_prompts(parts.prompts, recipe.seed, 1, min(count, len(parts.prompts)))
    client = parts.sampler
    log.info(f"the student answers {len(prompts)} prompts {samples} times")
    batch = RolloutBatch(prompts, samples, recipe.seed, step=1, stream=STREAM)
    environment = as_environment(parts.task)
    rollouts = add_rewards(
        sample_rollouts(batch, client, parts.renderer, plan.sampling, environment), parts.task
    )
    signals, trouble = _signals(parts.teacher, rollouts)
    found = Evidence(recipe, built, plan, prompts, samples, [], trouble=trouble)
    log.info("student and teacher are compared token by token")
    traces = list(_traces(found, client, rollouts, signals))
    for head in {head.key: head for signal in signals for head in signal.heads}.values():
        head.release()
    answers, canaries = (None, []) if trouble else _answers(found, rollouts)
    other = None if trouble else _under_students_template(found, rollouts)
    return replace(found, traces=traces, answers=answers, canaries=canaries, other_template=other)


def _signals(teacher: Teacher, rollouts: list[Rollout]) -> tuple[list[TeacherSignal], str]:
    """The richest signal that the teacher gives, and why there is none where it fails."""
    asked = _richest(teacher)
    if asked is None:
        return [TeacherSignal() for _ in rollouts], ""
    log.info(f"the teacher scores {len(rollouts)} rollouts")
    try:
        signals = teacher.score(rollouts, asked)
        assemble(rollouts, signals)
    except TeacherError as error:
        return [TeacherSignal() for _ in rollouts], str(error)
    return signals, ""


def _richest(teacher: Teacher) -> Signal | None:
    can = teacher.capabilities
    if "full" in can.signals:
        return Full()
    if "topk" in can.signals:
        support = "teacher" if "teacher" in can.supports else "student"
        return TopK(k=min(CANDIDATES, can.largest_k or CANDIDATES), support=support)
    return Sampled() if "sampled" in can.signals else None


@torch.no_grad()
def _traces(
    evidence: Evidence,
    client: SamplingClient,
    rollouts: Sequence[Rollout],
    signals: Sequence[TeacherSignal],
) -> Iterator[RolloutMeasurement]:
    requests = [
        ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist())) for rollout in rollouts
    ]
    own = client.score(requests, Full())
    stops = sorted(evidence.built.learner.renderer.stop_ids | evidence.teacher_stops)
    one_event = evidence.teacher_stops != evidence.built.learner.renderer.stop_ids
    head = next((signal.head for signal in own if signal.head is not None), None)
    adapter = (
        _RandomTeacher(head, evidence.seed)
        if isinstance(head, Head) and head.softcap is None
        else None
    )
    for rollout, mine, theirs in zip(rollouts, own, signals, strict=True):
        yield _RolloutMeter(rollout, stops, one_event, adapter).trace(mine, theirs)


class _RandomTeacher:
    """A random low-rank change of the student's head, the same at every token: a teacher that has nothing to teach."""

    def __init__(self, head: Head, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed_of(seed, STREAM, "adapter"))
        width = head.weight.shape[1]
        self.weight = head.weight[: head.vocab_size].float()
        self._down = (
            torch.randn(width, RANK, generator=generator).to(self.weight.device) / width**0.5
        )
        self._up = (
            torch.randn(RANK, head.vocab_size, generator=generator).to(self.weight.device)
            / RANK**0.5
        )

    def teacher(
        self, hidden: Float[Tensor, "T D"], student: Float[Tensor, "T V"], distance: float
    ) -> Float[Tensor, "T V"]:
        """Log-probabilities whose KL from the student's is about `distance`: KL is half the change's variance, for small ones."""
        change = hidden.float() @ self._down @ self._up
        mean = (student.exp() * change).sum(-1, keepdim=True)
        variance = (student.exp() * (change - mean).square()).sum(-1).mean().item()
        return torch.log_softmax(
            student + change * (2 * distance / max(variance, 1e-12)) ** 0.5, dim=-1
        )


class _RolloutMeter:
    """One rollout being measured, chunk by chunk."""

    def __init__(
        self, rollout: Rollout, stops: list[int], one_event: bool, adapter: _RandomTeacher | None
    ) -> None:
        self.rollout = rollout
        self._stops = torch.tensor(stops)
        self._one_event = one_event
        self._adapter = adapter
        self._columns: dict[str, list[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._norms: dict[str, float] = {}

    def trace(self, mine: TeacherSignal, theirs: TeacherSignal) -> RolloutMeasurement:
        states, theirs = mine.states, theirs.fetch()
        for part in chunks(len(self.rollout.tokens), CHUNK_TOKENS):
            assert states is not None and mine.head is not None, (
                "the student's own client gives its hidden states"
            )
            student = mine.head.logprobs(states[part])
            ids = self.rollout.tokens[part].to(student.device)
            teacher = read_tokens(theirs, part).to(student.device)
            alone = compare([(student, teacher.full, ids)], ALONE).known()
            self._add(
                logprobs=alone.pop("student_logprobs"), student_stop=self._event(student), **alone
            )
            self._compare(student, ids, teacher, states[part])
        columns = {name: torch.cat(values).cpu() for name, values in self._columns.items()}
        if not columns:  # an empty answer
            columns = {
                name: torch.zeros(0) for name in ("logprobs", "student_entropy", "student_stop")
            }
        shares = {
            name: (total.norm() / self._norms[name]).item() for name, total in self._sums.items()
        }
        return RolloutMeasurement(self.rollout, **columns, **shares)  # pyright: ignore[reportArgumentType]

    def _add(self, **columns: Tensor) -> None:
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)

    def _compare(
        self, student: Tensor, ids: Tensor, said: TeacherDistribution, hidden: Tensor
    ) -> None:
        if said.full is not None:
            self._whole(student, ids, said.full, hidden)
        elif said.topk_ids is not None and said.topk_logprobs is not None:
            self._candidates(student, ids, said)
        elif said.logprobs is not None:
            logprobs = F.gather_logprobs(student, ids)
            self._add(teacher_logprobs=said.logprobs, divergence=F.k1(logprobs, said.logprobs))
            self._judge(logprobs, said.logprobs)

    def _whole(self, student: Tensor, ids: Tensor, teacher: Tensor, hidden: Tensor) -> None:
        stops = self._stops.to(ids.device)
        event = torch.where(torch.isin(ids, stops), stops[0], ids) if self._one_event else ids
        shared = SHARED if student.shape[-1] >= FEWEST_TOKENS else ()
        measures = ("student_logprobs", "teacher_logprobs", "reverse_kl", *shared)
        merged = compare(
            [(self._merged(student), self._merged(teacher), event)], measures, CANDIDATES
        ).known()
        self._judge(merged.pop("student_logprobs"), merged.pop("teacher_logprobs"))
        divergence = merged.pop("reverse_kl")
        self._add(teacher_stop=self._event(teacher), divergence=divergence, **merged)
        if self._adapter is not None:
            self._pull("coherence", student, teacher)
            control = self._adapter.teacher(hidden, student, max(divergence.mean().item(), 1e-6))
            self._pull("control", student, control)

    def _candidates(self, student: Tensor, ids: Tensor, said: TeacherDistribution) -> None:
        assert said.topk_ids is not None and said.topk_logprobs is not None
        theirs, logprobs = said.topk_ids.long(), said.topk_logprobs
        valid: Bool[Tensor, "T K"] = torch.ones_like(theirs, dtype=torch.bool)
        one = F.restrict(student, theirs, valid, "bucket")
        other = F.restrict_candidates(logprobs, valid, "bucket", student.shape[-1])
        self._add(divergence=F.reverse_kl(one, other))
        teacher = (
            _among(theirs, logprobs, ids, other[:, -1]) if said.logprobs is None else said.logprobs
        )
        self._add(teacher_logprobs=teacher)
        self._judge(F.gather_logprobs(student, ids), teacher)
        if student.shape[-1] >= FEWEST_TOKENS:
            mine = student.topk(theirs.shape[-1], dim=-1)
            ratio, mass = overlap_of_top(*mine, theirs)
            self._add(
                overlap=ratio,
                student_mass=mass,
                teacher_mass=overlap_of_top(logprobs, theirs, mine.indices)[1],
            )

    def _judge(self, student: Tensor, teacher: Tensor) -> None:
        self._add(judged=teacher, advantage=teacher - student)

    def _pull(self, name: str, student: Tensor, teacher: Tensor) -> None:
        """Add up the gradients of KL(S || T) in the hidden states, and their norms."""
        assert self._adapter is not None
        gradients = reverse_kl_gradient(student, teacher) @ self._adapter.weight
        self._sums[name] = self._sums.get(name, torch.zeros(())) + gradients.sum(0).cpu()
        self._norms[name] = self._norms.get(name, 1e-12) + gradients.norm(dim=-1).sum().item()

    def _event(self, logprobs: Tensor) -> Tensor:
        return torch.logsumexp(logprobs[:, self._stops.to(logprobs.device)], dim=-1)

    def _merged(self, logprobs: Tensor) -> Tensor:
        """The distribution with all stop tokens as one, where student and teacher do not stop alike."""
        if not self._one_event:
            return logprobs
        stops = self._stops.to(logprobs.device)
        merged = logprobs.index_fill(-1, stops, -torch.inf)
        merged[:, stops[0]] = self._event(logprobs)
        return merged


def _among(candidates: Tensor, logprobs: Tensor, ids: Tensor, rest: Tensor) -> Tensor:
    """The sampled tokens' log-probabilities among candidates; the mass of all others, a bound, where they are none."""
    at = candidates == ids[:, None]
    return torch.where(at.any(-1), torch.where(at, logprobs, 0.0).sum(-1), rest)


def _answers(
    evidence: Evidence, rollouts: Sequence[Rollout]
) -> tuple[list[Rollout] | None, list[ParitySample]]:
    """The teacher's own answers, where there are rewards to compare, and its log-probabilities of its own tokens."""
    parts = evidence.built.parts
    has_rewards = any(rollout.reward is not None for rollout in rollouts)
    asked = rollouts if has_rewards else rollouts[: CANARIES * evidence.samples : evidence.samples]
    seeds = [
        seed_of(evidence.seed, STREAM, 1, rollout.prompt.id, rollout.sample) for rollout in asked
    ]  # the student's
    requests = [
        TeacherRequest(rollout.prompt, seed) for rollout, seed in zip(asked, seeds, strict=True)
    ]
    stops = evidence.plan.sampling.stop_ids | evidence.teacher_stops
    if parts.teacher.capabilities.writes:
        log.info(f"the teacher answers {len(requests)} times")
    samples = parts.teacher.sample(requests, replace(evidence.plan.sampling, stop_ids=stops))
    if samples is None:
        return None, []
    own = [
        _as_rollout(evidence, rollout, sample)
        for rollout, sample in zip(asked, samples, strict=True)
    ]
    return (add_rewards(own, parts.task) if has_rewards else None), _canaries(evidence, own)


def _as_rollout(evidence: Evidence, twin: Rollout, sample: Sample) -> Rollout:
    """The teacher's answer in the place of the student's."""
    return replace(
        twin,
        tokens=sample.tokens,
        loss_mask=torch.ones_like(sample.tokens, dtype=torch.bool),
        sampling_logprobs=sample.sampling_logprobs,
        policy_logprobs=sample.policy_logprobs,
        stop_reason=sample.stop_reason,
        text=evidence.built.parts.renderer.decode(sample.tokens.tolist()),
        reward=None,
        source="teacher",
        authors=None,
        turns=(),
        notes={},
    )


def _canaries(evidence: Evidence, own: Sequence[Rollout]) -> list[ParitySample]:
    """A few answers of the teacher scored by itself."""
    few = [answer for answer in own[:: max(len(own) // (2 * CANARIES), 1)] if len(answer.tokens)]
    signals = evidence.built.parts.teacher.score(few, Sampled())
    scored = [
        compare_signals(
            (TeacherSignal(), signal), answer.tokens, CHUNK_TOKENS, ("teacher_logprobs",)
        ).teacher_logprobs
        for signal, answer in zip(signals, few, strict=True)
    ]
    return [
        ParitySample(answer.prompt.id, answer.policy_logprobs, logprobs.cpu())
        for answer, logprobs in zip(few, scored, strict=True)
        if logprobs is not None
    ]


def _under_students_template(
    evidence: Evidence, rollouts: Sequence[Rollout]
) -> list[Tensor] | None:
    """The teacher's log-probabilities after the prompts as the student reads them, where the two read them differently."""
    parts = evidence.built.parts
    if evidence.recipe.teacher.type != "model":  # other teachers see another prompt on purpose
        return None
    voices = [parts.teacher.voice(rollout.prompt) for rollout in rollouts]
    alike = all(
        voice is None or voice.prompt_tokens == rollout.prompt_tokens
        for voice, rollout in zip(voices, rollouts, strict=True)
    )
    if alike or voices[0] is None:
        return None
    requests = [
        ScoreRequest(rollout.prompt_tokens, tuple(rollout.tokens.tolist())) for rollout in rollouts
    ]
    scored = voices[0].client.score(requests, Sampled())
    return [signal.logprobs for signal in scored if signal.logprobs is not None]
