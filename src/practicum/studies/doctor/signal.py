"""The checks of the signal: overlap, distance, depth, noise."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from practicum.losses import cuts_to_candidates, measures_teacher
from practicum.runs.check_outcome import CheckOutcome, skip_check
from practicum.statistics import Interval, concentration, quantiles
from practicum.studies.doctor.evidence import Evidence, find_term
from practicum.studies.doctor.findings import (
    find_worst_status,
    format_number,
    grade,
    override_terms,
)
from practicum.studies.doctor.measurements import (
    CANDIDATES,
    MIN_OVERLAP_VOCABULARY,
    RolloutMeasurement,
)
from practicum.studies.doctor.setup import SUPERVISED
from practicum.types import Rollout

OVERLAP, MIN_MASS = (0.70, 0.50), 0.95
DISTANCE = (0.5, 3.0)
UNLIKELY_LOGPROB, MAX_UNLIKELY, MIN_CONCENTRATION = -10.0, 0.01, 0.01
FIRST_BIN_TOKENS, MIN_PROMPTS = 16, 4
MIN_AGREEMENT = 0.8
MIN_SIGNAL_TO_NOISE = 100.0


def check_overlap(evidence: Evidence) -> CheckOutcome:
    """P5: Measure how many of the student's 16 most likely tokens are also the teacher's, and the mass
    of both on them."""
    ratio = evidence.estimate_mean(lambda row: row.overlap)
    if ratio is None:
        tokens = evidence.renderer.vocab_size
        reason = (
            f"a vocabulary of {tokens} tokens is too small to compare the top {CANDIDATES}"
            if tokens < MIN_OVERLAP_VOCABULARY
            else "the teacher returns no candidates"
        )
        return skip_check(evidence.no_signal_reason or reason)
    masses = (
        evidence.estimate_mean(lambda row: row.student_mass),
        evidence.estimate_mean(lambda row: row.teacher_mass),
    )
    smaller = min(mass.mean for mass in masses if mass is not None)
    status = find_worst_status(grade(ratio, *OVERLAP), "pass" if smaller >= MIN_MASS else "warn")
    text = (
        f"student and teacher share {ratio.mean:.0%} of their {CANDIDATES} most likely tokens, "
        f"with {smaller:.0%} of the mass"
    )
    fix: tuple[str, ...] = ()
    if status == "fail":
        text += ": too little overlap, so train the student on the teacher's answers first"
        fix = suggest_cold_start(evidence)
    return CheckOutcome(status, text, ratio, fix=fix, details={"mass on shared tokens": smaller})


def check_distance(evidence: Evidence) -> CheckOutcome:
    """P6: Measure the reverse KL to the target of the objective on the student's own answers, and its
    tails."""
    mean = evidence.estimate_mean(lambda row: row.divergence)
    if mean is None:
        return skip_check(evidence.no_signal_reason or "no answer has a token")
    unlikely = evidence.estimate_mean(_mark_unlikely)
    divergences = torch.cat(evidence.group_by_prompt(lambda row: row.divergence))
    half = concentration(divergences)
    levels = quantiles(divergences, (0.5, 0.95, 0.99, 0.999))
    status = grade(mean, *DISTANCE)
    has_tail = unlikely is not None and unlikely.low > MAX_UNLIKELY
    is_concentrated = half is not None and half < MIN_CONCENTRATION
    text = _describe_distance(evidence, mean.mean)
    fix: tuple[str, ...] = ()
    if status == "fail":
        text += (
            ", too far to learn from the student's own answers: start with the teacher's answers"
        )
        fix = suggest_cold_start(evidence)
    elif has_tail:
        text += (
            "; the teacher finds more than 1 % of the tokens nearly impossible, "
            "so bound what one token can do"
        )
    elif is_concentrated:
        text += "; fewer than 1 % of the tokens hold half of it"
    elif status == "warn":
        text += ": a bounded divergence is the gentler beginning"
    if status != "fail" and (status == "warn" or has_tail or is_concentrated):
        status, fix = "warn", suggest_bounded_divergence(evidence)
    details = {
        "share of tokens with half of it": half,
        "share with log T < -10": None if unlikely is None else unlikely.mean,
        **dict(zip(("p50", "p95", "p99", "p99.9"), levels, strict=True)),
    }
    return CheckOutcome(status, text, mean, "nats per token", fix, details=details)


def _describe_distance(evidence: Evidence, distance: float) -> str:
    """Describe the distance: its value, its two ends, and how it was estimated."""
    signals, term = evidence.teacher.capabilities.signals, find_term(evidence.plan)
    number, how = f"{format_number(distance)} nats per token apart", ""
    subject = "teacher"
    if term is not None and cuts_to_candidates(term.signal) and signals & {"full", "topk"}:
        how = f" over the {term.signal.candidates} candidates of the loss"
    elif "full" in signals:
        subject = "teacher" if term is None or measures_teacher(term) else "the target of the loss"
    elif "topk" in signals:
        number = f"at least {number}"
    else:
        how = ", estimated from the tokens of the answers"
    return f"student and {subject} are {number}{how}"


def check_depth(evidence: Evidence) -> CheckOutcome:
    """P7: Compare the models' agreement at the first tokens with their agreement at later tokens."""
    if evidence.no_signal_reason:
        return skip_check(evidence.no_signal_reason)
    has_overlap = any(row.overlap is not None for row in evidence.measurements)
    bins = _choose_bins(evidence)
    if len(bins) < 2:
        return skip_check(
            f"the answers are too short for a profile: fewer than {2 * FIRST_BIN_TOKENS} tokens"
        )
    profile = [
        (start, _estimate_agreement(evidence, start, end, has_overlap)) for start, end in bins
    ]
    first = max(profile[0][1].mean, 1e-9)
    ratios = [
        (start, Interval(level.mean / first, level.low / first, level.high / first))
        for start, level in profile
    ]
    last = ratios[-1][1]
    # A later part without agreement still has a right beginning: no failure.
    status = "pass" if last.mean >= MIN_AGREEMENT else "warn"
    measure = (
        f"overlap of the {CANDIDATES} most likely tokens"
        if has_overlap
        else "mean of min(1, T / S)"
    )
    details = {f"{measure} from token {start}": level.mean for start, level in profile}
    if status == "pass":
        text = "student and teacher agree as much at the end as at the beginning"
        return CheckOutcome(status, text, last, details=details)
    position = _find_drift(ratios)
    text = (
        f"from token {position} on, agreement is {last.mean:.0%} of that at the beginning; "
        "train only on the tokens before it"
    )
    fix = override_terms(evidence.recipe, f"weights=prefix({position})")
    return CheckOutcome(status, text, last, "of the first bin", fix, details=details)


def check_noise(evidence: Evidence) -> CheckOutcome:
    """P13: Test if an update sees enough tokens for a signal that has one log-probability per
    token."""
    mean = evidence.estimate_mean(lambda row: row.divergence)
    length = evidence.estimate_rollout_mean(lambda row: len(row.rollout.tokens))
    if mean is None or length is None:
        return skip_check(evidence.no_signal_reason or "no answer has a token")
    settings = evidence.recipe.train
    tokens = settings.prompts_per_step * evidence.plan.n * length.mean / settings.updates_per_step
    # For a small gap the log-ratio of a sampled token has mean KL and variance 2 KL, so the squared
    # mean over the variance is KL / 2 per token.
    ratio = Interval(*(tokens * max(kl, 0.0) / 2 for kl in (mean.mean, mean.low, mean.high)))
    signal = evidence.recipe.objective.signal
    if signal is None or not signal.sampled:
        text = (
            f"each update sees about {tokens:.0f} tokens with more of the teacher's "
            "distribution than the sampled token: no sampling noise"
        )
        unit = "signal to noise, if only sampled tokens were used"
        return CheckOutcome("pass", text, ratio, unit)
    if ratio.mean >= MIN_SIGNAL_TO_NOISE:
        text = f"about {tokens:.0f} sampled tokens per update are enough"
        return CheckOutcome("pass", text, ratio, "signal to noise")
    text = (
        f"about {tokens:.0f} sampled tokens per update are mostly noise; "
        "request more of the teacher's distribution per token, or train on more prompts"
    )
    fix = _suggest_less_noise(evidence, ratio.mean)
    return CheckOutcome("warn", text, ratio, "signal to noise", fix)


def suggest_cold_start(evidence: Evidence) -> tuple[str, ...]:
    """Return overrides for SFT first: on the teacher's completions, else on the task's."""
    name = f"name={evidence.recipe.name[:69]}-cold-start"
    if evidence.recipe.teacher.capabilities().writes:
        return ("rollout.source=teacher", "objective={signal: text, divergence: ce}", name)
    has_answers = all(prompt.response or prompt.answer for prompt in evidence.prompts)
    return (*SUPERVISED, name) if has_answers else ()


def suggest_bounded_divergence(evidence: Evidence) -> tuple[str, ...]:
    """Return overrides for a divergence that no token can make infinite (GKD, arXiv 2306.13649)."""
    terms = [term for term in evidence.recipe.objective.losses if term.needs_signal]
    if all(term.divergence.name == "reverse_kl" for term in terms):
        return override_terms(evidence.recipe, "divergence=jsd(0.5)")
    return ()


def _suggest_less_noise(evidence: Evidence, ratio: float) -> tuple[str, ...]:
    """Return overrides for the full signal if the teacher has it, else for more prompts."""
    if "full" in evidence.teacher.capabilities.signals:
        return (
            *override_terms(evidence.recipe, "signal=full"),
            *override_terms(evidence.recipe, "estimator=auto"),
        )
    factor = min(max(MIN_SIGNAL_TO_NOISE / max(ratio, 1e-3), 2.0), 64.0)
    return (f"train.prompts_per_step={round(evidence.recipe.train.prompts_per_step * factor)}",)


def _mark_unlikely(row: RolloutMeasurement) -> Tensor | None:
    """Return 1.0 for tokens that the teacher finds nearly impossible, else 0.0, [T]."""
    logprobs = row.teacher_event_logprobs
    return None if logprobs is None else (logprobs < UNLIKELY_LOGPROB).double()


def _choose_bins(evidence: Evidence) -> list[tuple[int, int]]:
    """Return spans of positions of doubling length that enough prompts' rollouts reach."""
    longest = max((len(row.rollout.tokens) for row in evidence.measurements), default=0)
    edges = [0, FIRST_BIN_TOKENS]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    min_prompts = min(MIN_PROMPTS, len(evidence.prompts))
    return [
        (start, end)
        for start, end in pairwise(edges)
        if _count_prompts(evidence.rollouts, (start + end) // 2) >= min_prompts
    ]


def _count_prompts(rollouts: Sequence[Rollout], position: int) -> int:
    """Count the prompts with a rollout that is longer than `position`."""
    return len({rollout.prompt.id for rollout in rollouts if len(rollout.tokens) > position})


def _estimate_agreement(evidence: Evidence, start: int, end: int, has_overlap: bool) -> Interval:
    """Return the mean top-k overlap of a span of positions, else the mean of min(1, T / S)."""

    def measure(row: RolloutMeasurement) -> Tensor | None:
        if has_overlap:
            return None if row.overlap is None else row.overlap[start:end]
        return None if row.advantage is None else row.advantage[start:end].clamp(max=0.0).exp()

    agreement = evidence.estimate_mean(measure)
    assert agreement is not None, "enough answers reach the span"
    return agreement


def _find_drift(ratios: Sequence[tuple[int, Interval]]) -> int:
    """Return the position where the last run of bins without agreement begins."""
    position = ratios[-1][0]
    for start, ratio in reversed(ratios[1:]):
        if ratio.mean >= MIN_AGREEMENT:
            break
        position = start
    return position
