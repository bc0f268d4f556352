"""Is the teacher's signal of use where the student goes: overlap, distance, depth, noise, and whether it adds up."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from practicum.statistics import Interval, concentration, quantiles
from practicum.studies.doctor.evidence import (
    CANDIDATES,
    FEWEST_TOKENS,
    Evidence,
    RolloutMeasurement,
)
from practicum.studies.doctor.findings import (
    CheckOutcome,
    Status,
    digits,
    find_worst_status,
    grade,
    override_terms,
    skipped,
)
from practicum.studies.doctor.setup import SUPERVISED
from practicum.types import Rollout

OVERLAP, MASS = (0.70, 0.50), 0.95
DISTANCE = (0.5, 2.0)
UNLIKELY, UNLIKELY_SHARE, CONCENTRATED = -10.0, 0.01, 0.01
SHORTEST_BIN, FEWEST_PROMPTS = 16, 4
DRIFT = (0.8, 0.5)
SIGNAL_TO_NOISE = 100.0
COHERENCE = 0.5


def overlap(evidence: Evidence) -> CheckOutcome:
    """P5: how many of the student's 16 likeliest tokens are among the teacher's, and the mass that both put on them."""
    ratio = evidence.mean(lambda trace: trace.overlap)
    if ratio is None:
        tokens = evidence.built.learner.renderer.vocab_size
        small = (
            f"a vocabulary of {tokens} tokens is too small to compare the {CANDIDATES} likeliest"
        )
        return skipped(
            evidence.silent
            or (small if tokens < FEWEST_TOKENS else "the teacher tells no candidates")
        )
    masses = (
        evidence.mean(lambda trace: trace.student_mass),
        evidence.mean(lambda trace: trace.teacher_mass),
    )
    least = min(mass.mean for mass in masses if mass is not None)
    status = find_worst_status(grade(ratio, *OVERLAP), "pass" if least >= MASS else "warn")
    text = f"of the {CANDIDATES} likeliest tokens student and teacher share {ratio.mean:.0%}, with {least:.0%} of the mass"
    if status == "fail":
        text += (
            ": they think differently, so let the student learn from the teacher's answers first"
        )
    fix = cold_start(evidence) if status == "fail" else ()
    return CheckOutcome(status, text, ratio, "", fix, details={"mass on shared tokens": least})


def distance(evidence: Evidence) -> CheckOutcome:
    """P6: reverse KL to the teacher on the student's own answers, and its tails."""
    mean = evidence.mean(lambda trace: trace.divergence)
    if mean is None:
        return skipped(evidence.silent or "no answer has a token")
    unlikely = evidence.mean(_unlikely)
    whole = torch.cat(evidence.by_prompt(lambda trace: trace.divergence))
    half = concentration(whole)
    levels = quantiles(whole, (0.5, 0.95, 0.99, 0.999))
    status = grade(mean, *DISTANCE)
    tail = unlikely is not None and unlikely.low > UNLIKELY_SHARE
    is_concentrated = half is not None and half < CONCENTRATED
    text = f"student and teacher are {digits(mean.mean)} nats a token apart"
    fix = (
        cold_start(evidence)
        if status == "fail"
        else suggest_bounded_divergence(evidence)
        if status == "warn" or tail or is_concentrated
        else ()
    )
    if status == "fail":
        text += (
            ", too far for a signal on the student's own answers: begin with the teacher's answers"
        )
    elif tail:
        text += "; the teacher finds more than 1 % of the tokens nearly impossible, so bound what one token can do"
        status = "warn"
    elif is_concentrated:
        text += "; fewer than 1 % of the tokens hold half of it"
        status = "warn"
    elif status == "warn":
        text += ": a bounded divergence is the gentler beginning"
    details = {
        "share of tokens with half of it": half,
        "share with log T < -10": None if unlikely is None else unlikely.mean,
        **dict(zip(("p50", "p95", "p99", "p99.9"), levels, strict=True)),
    }
    return CheckOutcome(status, text, mean, "nats a token", fix, details=details)


def depth(evidence: Evidence) -> CheckOutcome:
    """P7: does the agreement hold from the first token to the last?"""
    if evidence.silent:
        return skipped(evidence.silent)
    with_overlap = any(trace.overlap is not None for trace in evidence.traces)
    bins = _bins(evidence)
    if len(bins) < 2:
        return skipped(
            f"the answers are too short to have a profile: fewer than {2 * SHORTEST_BIN} tokens"
        )
    profile = [(start, _agreement(evidence, start, end, with_overlap)) for start, end in bins]
    first = profile[0][1].mean
    ratios = [(start, _scaled(value, first)) for start, value in profile]
    last = ratios[-1][1]
    status = grade(last, *DRIFT)
    what = (
        f"overlap of the {CANDIDATES} likeliest tokens" if with_overlap else "mean of min(1, T / S)"
    )
    details = {f"{what} from token {start}": value.mean for start, value in profile}
    if status == "pass":
        return CheckOutcome(
            status,
            "student and teacher agree as much at the end as at the beginning",
            last,
            details=details,
        )
    cap = _cap(ratios)
    text = f"from token {cap} on they agree {last.mean:.0%} as much as at the beginning; learn from what is before it"
    fix = override_terms(evidence.recipe, f"weights=prefix({cap})")
    return CheckOutcome(status, text, last, "of the first bin", fix, details=details)


def noise(evidence: Evidence) -> CheckOutcome:
    """P13: does an update see enough tokens for a signal that is one token deep?"""
    mean = evidence.mean(lambda trace: trace.divergence)
    length = evidence.mean_of_rollouts(lambda trace: len(trace.rollout.tokens))
    if mean is None or length is None:
        return skipped(evidence.silent or "no answer has a token")
    settings = evidence.recipe.train
    tokens = settings.prompts_per_step * evidence.plan.n * length.mean / settings.updates_per_step
    value = Interval(*(tokens * max(kl, 0.0) / 2 for kl in (mean.mean, mean.low, mean.high)))
    asked = evidence.recipe.objective.signal
    if asked is None or not asked.sampled:
        text = f"each update sees about {tokens:.0f} tokens with more of the teacher than the sampled token: no such noise"
        return CheckOutcome(
            "pass", text, value, "signal to noise, if sampled tokens alone were used"
        )
    if value.mean >= SIGNAL_TO_NOISE:
        return CheckOutcome(
            "pass",
            f"about {tokens:.0f} sampled tokens an update are enough",
            value,
            "signal to noise",
        )
    text = f"about {tokens:.0f} sampled tokens an update are mostly noise; ask the teacher for more a token, or more prompts"
    return CheckOutcome("warn", text, value, "signal to noise", _deeper(evidence, value.mean))


def coherence(evidence: Evidence) -> CheckOutcome:
    """P14: do the tokens' gradients add up, or cancel each other more than those of a random teacher would?"""
    if not any(trace.coherence is not None for trace in evidence.traces):
        return skipped(evidence.silent or "needs the teacher's whole distribution and a plain head")
    ratio = evidence.mean_of_rollouts(
        lambda trace: (
            None
            if trace.coherence is None or not trace.control
            else trace.coherence / trace.control
        )
    )
    own = evidence.mean_of_rollouts(lambda trace: trace.coherence)
    control = evidence.mean_of_rollouts(lambda trace: trace.control)
    if ratio is None or own is None or control is None:
        return skipped("the student is so sure of its tokens that nothing pulls at them")
    fine = ratio.mean >= COHERENCE
    text = (
        "the tokens of an answer pull together"
        if fine
        else "the tokens of an answer pull against each other"
    )
    text += f" ({own.mean:.0%} of their gradients add up; {control.mean:.0%} for a random teacher as far away)"
    return CheckOutcome("pass" if fine else "warn", text, ratio, "of the control")


def cold_start(evidence: Evidence) -> tuple[str, ...]:
    """Learn from whole answers first: the teacher's own where it writes, else the task's."""
    supervised = (
        "objective={signal: text, divergence: ce}",
        f"name={evidence.recipe.name[:69]}-cold-start",
    )
    if evidence.recipe.teacher.capabilities().writes:
        return ("rollout.source=teacher", *supervised)
    given = all(prompt.response or prompt.answer for prompt in evidence.prompts)
    return (*SUPERVISED, supervised[1]) if given else ()


def suggest_bounded_divergence(evidence: Evidence) -> tuple[str, ...]:
    """A divergence that no token can make infinite (GKD, arXiv 2306.13649)."""
    if all(
        term.divergence.name == "reverse_kl"
        for term in evidence.recipe.objective.losses
        if term.asks
    ):
        return override_terms(evidence.recipe, "divergence=jsd(0.5)")
    return ()


def _deeper(evidence: Evidence, now: float) -> tuple[str, ...]:
    if "full" in evidence.built.parts.teacher.capabilities.signals:
        return (
            *override_terms(evidence.recipe, "signal=full"),
            *override_terms(evidence.recipe, "estimator=auto"),
        )
    times = min(max(SIGNAL_TO_NOISE / max(now, 1e-3), 2.0), 64.0)
    return (f"train.prompts_per_step={round(evidence.recipe.train.prompts_per_step * times)}",)


def _unlikely(trace: RolloutMeasurement) -> Tensor | None:
    return None if trace.judged is None else (trace.judged < UNLIKELY).double()


def _bins(evidence: Evidence) -> list[tuple[int, int]]:
    """Spans of positions, each twice as long as the one before, that enough prompts' answers reach."""
    longest = max((len(trace.rollout.tokens) for trace in evidence.traces), default=0)
    edges = [0, SHORTEST_BIN]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    spans = list(pairwise(edges))
    wanted = min(FEWEST_PROMPTS, len(evidence.prompts))
    return [
        span for span in spans if _reaching(evidence.rollouts, (span[0] + span[1]) // 2) >= wanted
    ]


def _reaching(rollouts: Sequence[Rollout], position: int) -> int:
    return len({rollout.prompt.id for rollout in rollouts if len(rollout.tokens) > position})


def _agreement(evidence: Evidence, start: int, end: int, with_overlap: bool) -> Interval:
    def agreement(trace: RolloutMeasurement) -> Tensor | None:
        values = trace.overlap if with_overlap else trace.advantage
        if values is None:
            return None
        return values[start:end] if with_overlap else values[start:end].clamp(max=0.0).exp()

    found = evidence.mean(agreement)
    assert found is not None, "enough answers reach the span"
    return found


def _scaled(value: Interval, by: float) -> Interval:
    return Interval(*(number / max(by, 1e-9) for number in (value.mean, value.low, value.high)))


def _cap(ratios: Sequence[tuple[int, Interval]]) -> int:
    """Where the last run of bins without agreement begins."""
    last: Status = grade(ratios[-1][1], *DRIFT)
    limit = DRIFT[1] if last == "fail" else DRIFT[0]
    cap = ratios[-1][0]
    for start, ratio in reversed(ratios[1:]):
        if ratio.mean >= limit:
            break
        cap = start
    return cap
