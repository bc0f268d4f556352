"""The check of scorers: compare judges in words and learned scorers with the verifier."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from practicum.ports.scoring import (
    Scorer,
)
from practicum.runs.check_outcome import CheckOutcome, Status, skip_check
from practicum.statistics import Interval, auroc, clustered_auroc
from practicum.studies.doctor.evidence import Evidence
from practicum.training.judging import add_judgements
from practicum.training.loop import generate_rollouts
from practicum.types import Judgement, Rollout

FEWEST_FITS, MOST_FITS = 8, 64
"""The updates of a scorer on one step's answers: more than the fewest only to end its warm-up."""

WRITTEN = ("teacher", "dataset")
"""The writers that a discriminator should score above the student."""

MOST_ASKED = 16
"""The number of answers that a judge grades again with a reworded question."""

MAX_BIAS = 0.1
"""The mean change of a judgement, from 0 to 1, above which the check warns."""

CHANCE = 0.5


def check_scorers(evidence: Evidence) -> CheckOutcome:
    """P20: Compare the grades of judges and learned scorers with the verifier's rewards, and test
    whether position, length or a suggestion changes a judge's grade."""
    scorers = evidence.components.parts.scorers
    judges = {
        name: variants for name, scorer in scorers.items() if (variants := scorer.build_variants())
    }
    learners = {
        name: scorer
        for name, scorer in scorers.items()
        if name not in judges and evidence.recipe.scorers[name].follows_student
    }
    if not judges and not learners:
        return skip_check("no scorer of the recipe judges in words or learns")
    outcomes = [_check_judge(evidence, name, variants) for name, variants in judges.items()]
    outcomes += _check_learners(evidence, learners) if learners else []
    worst = min(outcomes, key=lambda outcome: SEVERITY[outcome.status])
    sentences = [outcome.sentence for outcome in outcomes if outcome is not worst]
    return replace(worst, sentence=". ".join([worst.sentence, *sentences]))


SEVERITY: dict[Status, int] = {
    "fail": 0,
    "warn": 1,
    "inconclusive": 2,
    "pass": 3,
    "not applicable": 4,
}


def _check_judge(evidence: Evidence, name: str, judges: Mapping[str, Scorer]) -> CheckOutcome:
    rollouts = evidence.rollouts
    variants = dict(judges)
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
            f"{name} graded no answer of {len(rollouts)}: check its template and model",
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
        return "inconclusive", f"{name} cannot be compared with a verifier here{remarks}"
    if area.high < CHANCE:
        return "fail", f"{name} prefers wrong answers{remarks}"
    if area.low <= CHANCE:
        return (
            "inconclusive",
            f"{name} cannot be distinguished from chance with so few answers{remarks}",
        )
    return ("warn" if remarks else "pass"), f"{name} ranks right answers above wrong ones{remarks}"


def _measure_change(
    variant: Scorer, rollouts: Sequence[Rollout], judgements: Sequence[Judgement]
) -> float | None:
    """Return the mean change of the judgements if the question is reworded."""
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


def _check_learners(evidence: Evidence, learners: Mapping[str, Scorer]) -> list[CheckOutcome]:
    """Fit scorers on the answers of one step, and check their scores on the next step."""
    fitted = add_judgements(_write_step(evidence, 1), learners, {})
    prompt_ids = {rollout.prompt.id for rollout in fitted}
    unseen = [
        rollout for rollout in _write_step(evidence, 2) if rollout.prompt.id not in prompt_ids
    ]
    before = add_judgements(unseen, learners, {})
    for name, scorer in learners.items():
        for count in range(MOST_FITS):
            scorer.fit(fitted)
            if count + 1 < FEWEST_FITS:
                continue
            # During its warm-up a scorer returns no value for any answer.
            if any(judged.value is not None for judged in scorer.score([*fitted, *unseen])):
                break
        fitted = add_judgements(fitted, {name: scorer}, {})
    after = add_judgements(unseen, learners, {})
    return [_compare_with_labels(evidence, name, before, after) for name in learners]


def _write_step(evidence: Evidence, step: int) -> list[Rollout]:
    """Return the answers of a step as the recipe writes them, including the teacher's and searched
    answers."""
    parts, settings = evidence.components.parts, evidence.components.settings
    return generate_rollouts(step, settings.plan(step), parts, settings, parts.sampler, 0)


def _label(rollout: Rollout, imitates: bool) -> bool | None:
    """Return True if an answer should rank above others; None without a verifier's reward."""
    if imitates:
        return rollout.source in WRITTEN
    return None if rollout.reward is None else rollout.reward >= 1.0


def _compare_with_labels(
    evidence: Evidence, name: str, before: Sequence[Rollout], after: Sequence[Rollout]
) -> CheckOutcome:
    """Return how often a scorer ranks unseen answers as it should, before and after it learned."""
    config = evidence.recipe.scorers[name]
    imitates = config.imitates_teacher
    areas: list[Interval | None] = []
    count = 0
    for rollouts in (before, after):
        rows = [
            (value, label, rollout.prompt.id)
            for rollout in rollouts
            if (value := rollout.judgements[name].value) is not None
            and (label := _label(rollout, imitates)) is not None
        ]
        values = [value for value, _, _ in rows]
        labels = [label for _, label, _ in rows]
        groups = [group for _, _, group in rows]
        areas.append(clustered_auroc(values, labels, groups, evidence.seed) if rows else None)
        count = len(rows)
    start, area = areas
    whose = "the teacher's answers above the student's" if imitates else "right answers above wrong"
    sentence = f"{name}, after it learned from one step, ranks {whose}"
    details = {"answers judged": float(count), "before it learned": start and start.mean}
    unit = "of the pairs ranked rightly"
    if area is None or area.low <= CHANCE <= area.high:
        text = f"{name} cannot be distinguished from chance with {count} unseen answers"
        needs = 4 * max(count, 1)
        return CheckOutcome(
            "inconclusive", text, area, unit, rollouts_needed=needs, details=details
        )
    if area.high < CHANCE:
        return CheckOutcome(
            "fail", f"{sentence} less often than chance", area, unit, details=details
        )
    return CheckOutcome("pass", sentence, area, unit, details=details)
