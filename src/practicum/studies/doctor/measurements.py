"""The measurements of student rollouts, token by token, from both models' signals."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from practicum import functional as F
from practicum.functional.chunked import chunks
from practicum.functional.comparison import compare
from practicum.functional.distributions import overlap_of_top
from practicum.losses import compare_candidates, read_target, read_tokens
from practicum.losses.signal_reader import compare_distributions
from practicum.losses.support import share_pair
from practicum.objective import Term
from practicum.objective.distribution import TeacherDistribution
from practicum.types import Rollout, TeacherSignal

STREAM = "doctor"
"""The name of the doctor's random streams."""

CANDIDATES = 16
"""The k of the top-k overlap (arXiv 2604.13016)."""

MIN_OVERLAP_VOCABULARY = 4 * CANDIDATES
"""The smallest vocabulary, in tokens, for which the top-k overlap is computed: in a smaller one two
random models share many of their k most likely tokens."""

SINGLE_MEASURES = ("student_logprobs", "teacher_logprobs", "student_entropy", "teacher_entropy")
PAIR_MEASURES = ("overlap", "student_mass", "teacher_mass")

CHUNK_TOKENS = 128
"""The number of tokens per chunk in which full distributions are compared."""


@dataclass(frozen=True, slots=True)
class RolloutMeasurement:
    """The measurements of one student rollout of T tokens; None without such a signal.

    `logprobs` are the student's, scored and not as sampled. `advantage` is the teacher's
    log-probability `teacher_event_logprobs` minus the student's; in both, one stop token represents
    all stop tokens of either model. `divergence` is KL(S || T): exact, a lower bound from the
    teacher's candidates and one tail, or the log-ratio of the sampled token. In these, in the
    overlap and the masses, T is the target of the objective: the teacher at the
    objective's temperature, mixed or restricted as the loss has it. `student_stop` and
    `teacher_stop` are the log-probabilities of stopping with any stop token of either model.
    """

    rollout: Rollout
    logprobs: Float[Tensor, " T"]
    student_entropy: Float[Tensor, " T"]
    student_stop: Float[Tensor, " T"]
    teacher_logprobs: Float[Tensor, " T"] | None = None
    teacher_event_logprobs: Float[Tensor, " T"] | None = None
    advantage: Float[Tensor, " T"] | None = None
    divergence: Float[Tensor, " T"] | None = None
    teacher_entropy: Float[Tensor, " T"] | None = None
    teacher_stop: Float[Tensor, " T"] | None = None
    overlap: Float[Tensor, " T"] | None = None
    student_mass: Float[Tensor, " T"] | None = None
    teacher_mass: Float[Tensor, " T"] | None = None
    student_outside: Float[Tensor, " T"] | None = None
    teacher_outside: Float[Tensor, " T"] | None = None


@torch.no_grad()
def measure_rollouts(
    rollouts: Sequence[Rollout],
    student_signals: Sequence[TeacherSignal],
    teacher_signals: Sequence[TeacherSignal],
    stops: tuple[frozenset[int], frozenset[int]],
    target: "Target | None" = None,
) -> list[RolloutMeasurement]:
    """Measure each rollout with the student's full signal about it and the teacher's signal.

    `stops` are the stop token ids of student and teacher. Without a `target` the teacher is.
    """
    stop_ids = sorted(stops[0] | stops[1])
    nothing = [None] * len(rollouts)
    references = nothing if target is None else target.references
    candidates = nothing if target is None else target.candidates
    term = None if target is None else target.term
    return [
        _RolloutMeter(rollout, stop_ids, stops[0] != stops[1], term, reference, cut).measure(
            student, teacher
        )
        for rollout, student, teacher, reference, cut in zip(
            rollouts, student_signals, teacher_signals, references, candidates, strict=True
        )
    ]


@dataclass(frozen=True, slots=True)
class Target:
    """The measured term, with further signals of each rollout that its target needs.

    `candidates` are the teacher's at the candidates of the loss, if it gives no whole distributions.
    """

    term: Term
    references: Sequence[TeacherSignal | None]
    candidates: Sequence[TeacherSignal | None]


def _fill_unknown(
    teacher: Float[Tensor, " T"], student: Float[Tensor, " T"], unknown: Bool[Tensor, " T"] | None
) -> Float[Tensor, " T"]:
    """Return the teacher's log-probabilities, the student's at tokens that the teacher lacks.

    The teacher has no score for them, so there is no gap.
    """
    return teacher if unknown is None else torch.where(unknown, student.to(teacher), teacher)


class _RolloutMeter:
    """Measure one rollout chunk by chunk, so that few [tokens, V] matrices exist at the same
    time."""

    def __init__(
        self,
        rollout: Rollout,
        stops: list[int],
        needs_merged_stops: bool,
        term: Term | None,
        reference: TeacherSignal | None,
        candidates: TeacherSignal | None,
    ) -> None:
        self._term = term
        self._reference = reference
        self._candidates = None if candidates is None else candidates.fetch()
        self._rollout = rollout
        self._stops = torch.tensor(stops)
        self._needs_merged_stops = needs_merged_stops
        self._columns: dict[str, list[Tensor]] = {}

    def measure(self, student: TeacherSignal, teacher: TeacherSignal) -> RolloutMeasurement:
        """Return the measurements of the rollout."""
        states, teacher = student.states, teacher.fetch()
        for chunk in chunks(len(self._rollout.tokens), CHUNK_TOKENS):
            assert states is not None and student.head is not None, (
                "the student's own client gives its hidden states"
            )
            logprobs = student.head.logprobs(states[chunk])
            ids = self._rollout.tokens[chunk].to(logprobs.device)
            signal = read_tokens(teacher, chunk).to(logprobs.device)
            singles = compare_distributions(
                TeacherDistribution(logprobs), signal, ids, SINGLE_MEASURES
            )
            if "teacher_logprobs" in singles:
                singles["teacher_logprobs"] = _fill_unknown(
                    singles["teacher_logprobs"], singles["student_logprobs"], signal.unknown
                )
            self._add(
                logprobs=singles.pop("student_logprobs"),
                student_stop=self._sum_stops(logprobs),
                **singles,
            )
            reference = None
            if self._reference is not None:
                reference = read_tokens(self._reference, chunk).to(logprobs.device).full
            cut = None
            if self._candidates is not None:
                cut = read_tokens(self._candidates, chunk).to(logprobs.device)
            self._compare_chunk(logprobs, ids, signal, reference, cut)
        columns = {name: torch.cat(values).cpu() for name, values in self._columns.items()}
        if not columns:  # an empty completion
            columns = dict.fromkeys(("logprobs", "student_entropy", "student_stop"), torch.zeros(0))
        return RolloutMeasurement(self._rollout, **columns)

    def _add(self, **columns: Tensor) -> None:
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)

    def _compare_chunk(
        self,
        student: Tensor,
        ids: Tensor,
        signal: TeacherDistribution,
        reference: Tensor | None,
        cut: TeacherDistribution | None,
    ) -> None:
        """Add the measures of a chunk that the richest part of the teacher's signal allows."""
        if signal.full is not None:
            self._compare_full(student, ids, signal, reference)
        elif signal.topk_ids is not None and signal.topk_logprobs is not None:
            self._compare_candidates(student, ids, signal, cut)
        elif signal.logprobs is not None:
            logprobs = F.gather_logprobs(student, ids)
            teacher = _fill_unknown(signal.logprobs, logprobs, signal.unknown)
            self._add(teacher_logprobs=teacher, divergence=F.k1(logprobs, teacher))
            self._add_advantage(logprobs, teacher)

    def _compare_full(
        self,
        logprobs: Tensor,
        ids: Tensor,
        signal: TeacherDistribution,
        reference: Tensor | None,
    ) -> None:
        student, teacher = share_pair(logprobs, signal)
        if signal.outside is not None:
            self._add(
                student_outside=logprobs[:, signal.outside].exp().sum(dim=-1),
                teacher_outside=teacher[:, -1].exp(),
            )
        # A stop token that is missing from the teacher is a setup error for every target.
        self._add(teacher_stop=self._sum_stops(teacher))
        restricted = None
        if self._term is not None:
            teacher, restricted = read_target(self._term, student, teacher, reference)
        stops = self._stops.to(ids.device)
        events = (
            torch.where(torch.isin(ids, stops), stops[0], ids) if self._needs_merged_stops else ids
        )
        pair_measures = PAIR_MEASURES if student.shape[-1] >= MIN_OVERLAP_VOCABULARY else ()
        merged = compare(
            [(self._merge_stops(student), self._merge_stops(teacher), events)],
            ("student_logprobs", "teacher_logprobs", "reverse_kl", *pair_measures),
            CANDIDATES,
        ).known()
        events_of = merged.pop("student_logprobs"), merged.pop("teacher_logprobs")
        sampled = F.gather_logprobs(logprobs, ids)
        self._add_advantage(*(_fill_unknown(part, sampled, signal.unknown) for part in events_of))
        divergence = merged.pop("reverse_kl")
        divergence = divergence if restricted is None else restricted
        self._add(divergence=divergence, **merged)

    def _compare_candidates(
        self,
        student: Tensor,
        ids: Tensor,
        signal: TeacherDistribution,
        cut: TeacherDistribution | None,
    ) -> None:
        assert signal.topk_ids is not None and signal.topk_logprobs is not None
        candidates, logprobs = signal.topk_ids.long(), signal.topk_logprobs
        valid: Bool[Tensor, "T K"] = torch.isfinite(logprobs)
        # Both distributions become K candidates and one bucket with the remaining mass. Merging
        # outcomes can only lower a KL, so this divergence is a lower bound.
        student_buckets = F.restrict(student, candidates, valid, "bucket")
        teacher_buckets = F.restrict_candidates(logprobs, valid, "bucket", student.shape[-1])
        divergence = None
        if cut is not None and self._term is not None:
            divergence = compare_candidates(self._term.signal, student, cut)
        if divergence is None:
            divergence = F.reverse_kl(student_buckets, teacher_buckets)
        self._add(divergence=divergence)
        teacher = signal.logprobs
        if teacher is None:
            # A token outside the candidates has at most the probability of the bucket.
            is_sampled = candidates == ids[:, None]
            matches = torch.where(is_sampled, logprobs, 0.0).sum(-1)
            teacher = torch.where(is_sampled.any(-1), matches, teacher_buckets[:, -1])
        teacher = _fill_unknown(teacher, F.gather_logprobs(student, ids), signal.unknown)
        self._add(teacher_logprobs=teacher)
        self._add_advantage(F.gather_logprobs(student, ids), teacher)
        if student.shape[-1] >= MIN_OVERLAP_VOCABULARY:
            student_top = student.topk(candidates.shape[-1], dim=-1)
            overlap, student_mass = overlap_of_top(*student_top, candidates)
            teacher_mass = overlap_of_top(logprobs, candidates, student_top.indices)[1]
            self._add(overlap=overlap, student_mass=student_mass, teacher_mass=teacher_mass)

    def _add_advantage(self, student: Tensor, teacher: Tensor) -> None:
        self._add(teacher_event_logprobs=teacher, advantage=teacher - student)

    def _sum_stops(self, logprobs: Tensor) -> Tensor:
        """Return the log-probability of any stop token, [T]."""
        return torch.logsumexp(logprobs[:, self._stops.to(logprobs.device)], dim=-1)

    def _merge_stops(self, logprobs: Tensor) -> Tensor:
        """Return the distributions with all stop tokens as one, if the models stop differently."""
        if not self._needs_merged_stops:
            return logprobs
        stops = self._stops.to(logprobs.device)
        merged = logprobs.index_fill(-1, stops, -torch.inf)
        merged[:, stops[0]] = self._sum_stops(logprobs)
        return merged
