"""The check of judges in words: their calibration against the verifier, and what else moves them."""

from collections.abc import Sequence
from statistics import fmean, median

from practicum.ports.scoring import Scorer, VariedScorer
from practicum.statistics import Interval, auroc
from practicum.studies.doctor.evidence import Evidence
from practicum.studies.doctor.findings import CheckOutcome, Status, skip_check
from practicum.types import Judgement, Rollout

MOST_ASKED = 16
"""The answers that a judge is asked about again with its question put otherwise."""

MAX_BIAS = 0.1
"""The mean change of a judgement, from 0 to 1, above which the check warns."""

CHANCE = 0.5


def check_judges(evidence: Evidence) -> CheckOutcome:
    """P20: Compare a judge's grades with the verifier's rewards, and see whether position, length
    or a suggestion moves them."""
    judges = {
        name: scorer
        for name, scorer in evidence.components.parts.scorers.items()
        if isinstance(scorer, VariedScorer)
    }
    if not judges:
        return skip_check("no scorer of the recipe judges in words")
    outcomes = [_check_judge(evidence, name, judge) for name, judge in judges.items()]
    return min(outcomes, key=lambda outcome: SEVERITY[outcome.status])


SEVERITY: dict[Status, int] = {
    "fail": 0,
    "warn": 1,
    "inconclusive": 2,
    "pass": 3,
    "not applicable": 4,
}


def _check_judge(evidence: Evidence, name: str, judge: VariedScorer) -> CheckOutcome:
    rollouts = evidence.rollouts
    variants = dict(judge.build_variants())
    judgements = variants.pop("nothing").score(rollouts)
    pairs = [
        (judgement.value, rollout)
        for judgement, rollout in zip(judgements, rollouts, strict=True)
        if judgement.value is not None
    ]
    undecided = 1 - len(pairs) / len(rollouts)
    if not pairs:
        return CheckOutcome(
            "fail",
            f"{name} gave none of {len(rollouts)} answers a grade: look at its template and model",
        )
    biases = {
        f"moved by {change}": _measure_change(variant, rollouts, judgements)
        for change, variant in variants.items()
    }
    length = compare_lengths(pairs)
    biases["kinder to longer answers"] = None if length is None else length - CHANCE
    verified = [(value, rollout.reward) for value, rollout in pairs if rollout.reward is not None]
    area = auroc([value for value, _ in verified], [reward >= 1.0 for _, reward in verified])
    gap = fmean(value - reward for value, reward in verified) if verified else None
    details = {"without a grade": undecided, "mean grade minus mean reward": gap, **biases}
    status, sentence = _describe(name, area, undecided, biases)
    needs = 4 * len(rollouts) if status == "inconclusive" else None
    unit = "of the pairs ranked as the verifier does"
    return CheckOutcome(status, sentence, area, unit, rollouts_needed=needs, details=details)


def _describe(
    name: str, area: Interval | None, undecided: float, biases: dict[str, float | None]
) -> tuple[Status, str]:
    """Return the status of a judge and a sentence about it."""
    moved = [bias for bias, size in biases.items() if size is not None and abs(size) > MAX_BIAS]
    remarks = f"; it is {', '.join(moved)}" if moved else ""
    remarks += f"; {undecided:.0%} of the answers got no grade" if undecided else ""
    if area is None:
        return "inconclusive", f"{name} cannot be held against a verifier here{remarks}"
    if area.high < CHANCE:
        return "fail", f"{name} prefers wrong answers{remarks}"
    if area.low <= CHANCE:
        return "inconclusive", f"{name} cannot be told from chance by so few answers{remarks}"
    return ("warn" if remarks else "pass"), f"{name} ranks right answers above wrong ones{remarks}"


def _measure_change(
    variant: Scorer, rollouts: Sequence[Rollout], judgements: Sequence[Judgement]
) -> float | None:
    """Return the mean change of the judgements if the question is put otherwise."""
    changes = [
        changed.value - judgement.value
        for changed, judgement in zip(
            variant.score(rollouts[:MOST_ASKED]), judgements[:MOST_ASKED], strict=True
        )
        if changed.value is not None and judgement.value is not None
    ]
    return fmean(changes) if changes else None


def compare_lengths(pairs: Sequence[tuple[float, Rollout]]) -> float | None:
    """Return how often a longer answer is graded above a shorter one of the same reward.

    Ties count half. Answers are long if they have more tokens than the median of their reward;
    None if no reward has both kinds.
    """
    areas: list[tuple[float, int]] = []
    for reward in {rollout.reward for _, rollout in pairs}:
        group = [(value, len(r.tokens)) for value, r in pairs if r.reward == reward]
        middle = median(length for _, length in group)
        area = auroc([value for value, _ in group], [length > middle for _, length in group])
        if area is not None:
            areas.append((area.mean, len(group)))
    total = sum(count for _, count in areas)
    return sum(area * count for area, count in areas) / total if total else None
