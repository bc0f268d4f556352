"""Has the teacher something to teach: better answers, a signal that prefers right ones, prompts of the right difficulty."""

import math

from practicum.statistics import (
    Interval,
    auroc,
    clustered_auroc,
    difference,
    rollouts_needed,
    wilson,
)
from practicum.studies.doctor.evidence import Evidence
from practicum.studies.doctor.findings import CheckOutcome, format_interval, override_terms, skipped

SAME_ACCURACY, SAME_DISTRIBUTION = 0.03, 1e-3
FEWEST_OF_EACH = 5
BAND = 0.3
MOST_ROLLOUTS = 100_000


def gap(evidence: Evidence) -> CheckOutcome:
    """P10: how much more often the teacher is right on the same prompts."""
    distance = evidence.mean(lambda trace: trace.divergence)
    if distance is not None and max(abs(distance.low), abs(distance.high)) < SAME_DISTRIBUTION:
        text = f"the teacher says what the student says already: {format_interval(distance)} nats a token apart"
        return CheckOutcome("fail", text, Interval(0.0, 0.0, 0.0), "of answers")
    mine = evidence.scores(evidence.rollouts)
    if evidence.answers is None or not mine:
        return skipped(_why_no_gap(evidence, bool(mine)))
    theirs = evidence.scores(evidence.answers)
    student = [sum(mine[prompt]) / len(mine[prompt]) for prompt in mine]
    teacher = [sum(theirs[prompt]) / len(theirs[prompt]) for prompt in mine]
    value = accuracy_gap(teacher, student, evidence.seed)
    new = sum(
        not any(r >= 1 for r in mine[p]) and any(r >= 1 for r in theirs[p]) for p in mine
    ) / len(mine)
    one, other = sum(teacher) / len(teacher), sum(student) / len(student)
    details = {
        "accuracy of the teacher": one,
        "of the student": other,
        "prompts that only the teacher solves": new,
    }
    answers = f"the teacher is right in {one:.0%} of its answers, the student in {other:.0%}"
    if value.low > 0:
        return CheckOutcome("pass", answers, value, "of answers", details=details)
    if value.high < 0:
        return CheckOutcome(
            "fail", f"{answers}: the student would unlearn", value, "of answers", details=details
        )
    if value.low >= -SAME_ACCURACY and value.high <= SAME_ACCURACY:
        return CheckOutcome(
            "fail", f"{answers}: no gap, so nothing to gain", value, "of answers", details=details
        )
    text = f"{answers}: {len(evidence.rollouts)} answers of each cannot tell them apart"
    return CheckOutcome(
        "inconclusive", text, value, "of answers", needs=_needed(one, other), details=details
    )


def accuracy_gap(teacher: list[float], student: list[float], seed: int) -> Interval:
    """The paired gap; where all prompts agree, as wide as the chance that another one would not (Wilson, none of n)."""
    found = difference(teacher, student, seed)
    if found.low < found.high:
        return found
    room = wilson(0.0, len(teacher)).high
    return Interval(found.mean, max(found.mean - room, -1.0), min(found.mean + room, 1.0))


def informativeness(evidence: Evidence) -> CheckOutcome:
    """P11: does the teacher's signal prefer the student's right answers to its wrong ones?"""
    if evidence.silent:
        return skipped(evidence.silent)
    known = [
        trace
        for trace in evidence.traces
        if trace.advantage is not None
        and trace.rollout.reward is not None
        and len(trace.rollout.tokens)
    ]
    if not known:
        return skipped("the task has no verifier, so no answer is known to be right")
    signals = [trace.advantage.mean().item() for trace in known if trace.advantage is not None]
    levels = [trace.judged.mean().item() for trace in known if trace.judged is not None]
    right = [(trace.rollout.reward or 0.0) >= 1.0 for trace in known]
    good, bad = sum(right), len(right) - sum(right)
    if min(good, bad) < FEWEST_OF_EACH:
        text = f"{good} right and {bad} wrong answers; {FEWEST_OF_EACH} of each are needed to compare what the teacher says of them"
        return CheckOutcome("inconclusive", text, needs=_estimate_rollouts_needed(good, bad))
    narrow = auroc(signals, right)
    wide = clustered_auroc(
        signals, right, [trace.rollout.prompt.id for trace in known], evidence.seed
    )
    assert narrow is not None and wide is not None, "both kinds are there"
    value = Interval(narrow.mean, min(narrow.low, wide.low), max(narrow.high, wide.high))
    mean = {
        kind: sum(v for v, hit in zip(levels, right, strict=True) if hit is kind)
        for kind in (True, False)
    }
    details = {"mean log T of right answers minus wrong": mean[True] / good - mean[False] / bad}
    if value.high < 0.5:
        text = "the teacher's signal prefers the student's wrong answers"
        return CheckOutcome("fail", text, value, "AUROC", details=details)
    if value.low > 0.5:
        return CheckOutcome(
            "pass", "the teacher's signal prefers right answers", value, "AUROC", details=details
        )
    spread = (value.high - value.low) / 2
    needs = min(
        math.ceil(len(known) * (spread / max(abs(value.mean - 0.5), 1e-9)) ** 2), MOST_ROLLOUTS
    )
    text = "whether the teacher's signal prefers right answers cannot be told from so few"
    return CheckOutcome(
        "inconclusive", text, value, "AUROC", needs=max(needs, len(known) + 1), details=details
    )


def pass_rates(evidence: Evidence) -> CheckOutcome:
    """P12: prompts that the student sometimes solves, from which most is learned."""
    rewards = list(evidence.scores(evidence.rollouts).values())
    if not rewards:
        return skipped("the task has no verifier")
    if evidence.samples < 2:
        return skipped("one answer a prompt tells no pass rate; use --samples 4")
    within = sum(0.0 < sum(own) / len(own) < 1.0 for own in rewards)
    solved = sum(min(own) >= 1.0 for own in rewards)
    value = wilson(float(within), len(rewards))
    never = len(rewards) - within - solved
    text = f"of {len(rewards)} prompts the student solves {solved} always, {never} never, {within} sometimes"
    if value.mean >= BAND:
        return CheckOutcome("pass", text, value, "of prompts")
    if not within:
        return CheckOutcome("fail", f"{text}: choose other prompts", value, "of prompts")
    several = () if evidence.recipe.rollout.n > 1 else ("rollout.n=4",)
    return CheckOutcome(
        "warn",
        text,
        value,
        "of prompts",
        (*override_terms(evidence.recipe, "samples=pass_rate"), *several),
    )


def _why_no_gap(evidence: Evidence, has_rewards: bool) -> str:
    if not has_rewards:
        return "the task has no verifier, so nobody's answers can be counted"
    return evidence.trouble or "the teacher writes no answers of its own"


def _needed(one: float, other: float) -> int:
    """Answers of each model that would show this gap, or, where there is none, one of three hundredths."""
    found = rollouts_needed(one, other)
    if found is None:
        middle = min(max(one, 0.05), 0.95)
        found = rollouts_needed(middle + SAME_ACCURACY, middle) or MOST_ROLLOUTS
    return min(found, MOST_ROLLOUTS)


def _estimate_rollouts_needed(good: int, bad: int) -> int | None:
    """Rollouts that would hold enough right and wrong answers at this rate; None where one kind never came."""
    least = min(good, bad)
    return math.ceil((good + bad) * FEWEST_OF_EACH / least) if least else None
