"""The checks of the task: teacher's gap, signal's preference, prompts' difficulty."""

import math

from practicum.functional import ADVANTAGES
from practicum.runs.check_outcome import CheckOutcome, skip_check
from practicum.statistics import (
    Interval,
    auroc,
    clustered_auroc,
    difference,
    group_pairs,
    rollouts_needed,
    wilson,
)
from practicum.studies.doctor.evidence import Evidence
from practicum.studies.doctor.findings import format_interval, override_terms
from practicum.text.safe import excerpt
from practicum.types import Rollout

SAME_ACCURACY = 0.03
"""An accuracy gap counts as none if its whole interval is within this distance of 0."""

SAME_DISTRIBUTION = 1e-3
"""Student and teacher count as equal if the whole interval of their KL is below this, in nats per
token."""

MIN_OF_EACH = 5
MIN_SOLVED_SOMETIMES = 0.3
MAX_ROLLOUTS = 100_000


TEACHER_ACCURACY = "accuracy of the teacher"
UNREWARDED = "answers of each without a reward"
"""The names of two numbers of P10; the second only exists if the verifier is suspected."""

MIN_UNREWARDED = 64
"""Answers of each model without any reward from which the verifier is suspected: the doctor's
default number of answers."""

SHOWN_CHARACTERS = 60


def check_gap(evidence: Evidence) -> CheckOutcome:
    """P10: Compare how often teacher and student are right on the same prompts."""
    divergence = evidence.estimate_mean(lambda row: row.divergence)
    if divergence and max(abs(divergence.low), abs(divergence.high)) < SAME_DISTRIBUTION:
        text = (
            "teacher and student already give the same answers: "
            f"{format_interval(divergence)} nats per token apart"
        )
        return CheckOutcome("fail", text, Interval(0.0, 0.0, 0.0), "of answers")
    student_rewards = evidence.group_rewards(evidence.rollouts)
    if not student_rewards:
        return skip_check("the task has no verifier, so no answer can be graded")
    if evidence.answers is None:
        return skip_check(evidence.scoring_error or "the teacher writes no answers")
    teacher_rewards = evidence.group_rewards(evidence.answers)
    pairs = [(teacher_rewards[prompt], student_rewards[prompt]) for prompt in student_rewards]
    teacher = [sum(rewards) / len(rewards) for rewards, _ in pairs]
    student = [sum(rewards) / len(rewards) for _, rewards in pairs]
    gap = difference(teacher, student, evidence.seed)
    teacher_accuracy, student_accuracy = sum(teacher) / len(pairs), sum(student) / len(pairs)
    only_teacher = sum(max(learner) < 1 <= max(expert) for expert, learner in pairs)
    details = {
        TEACHER_ACCURACY: teacher_accuracy,
        "of the student": student_accuracy,
        "prompts that only the teacher solves": only_teacher / len(pairs),
    }
    text = (
        f"the teacher is right in {teacher_accuracy:.0%} of its answers, "
        f"the student in {student_accuracy:.0%}"
    )
    status, needs = "fail", None
    if gap.high < 0:
        text += ": the student would get worse"
    elif teacher_accuracy == 0:
        status, needs = "inconclusive", 2 * len(evidence.rollouts)
        if student_accuracy == 0 and len(evidence.rollouts) >= MIN_UNREWARDED:
            details[UNREWARDED] = float(len(evidence.rollouts))
            text += f": check the verifier, {_describe_answer(evidence.answers[0])}"
        else:
            text += ": no right answer of the teacher was seen"
    elif gap.low > 0:
        status = "pass"
    elif gap.low >= -SAME_ACCURACY and gap.high <= SAME_ACCURACY:
        text += ": no gap, so nothing to gain"
    else:
        status, needs = "inconclusive", _estimate_answers_needed(teacher_accuracy, student_accuracy)
        text += f": {len(evidence.rollouts)} answers of each are too few to distinguish them"
    return CheckOutcome(status, text, gap, "of answers", rollouts_needed=needs, details=details)


def _describe_answer(answer: Rollout) -> str:
    """Show an answer that got no reward, next to the expected answer if the row has one."""
    expected = answer.prompt.answer
    text = f"which gives no reward to {excerpt(answer.text, most=SHOWN_CHARACTERS)!r}"
    if expected is None:
        return text
    return f"{text} where {excerpt(expected, most=SHOWN_CHARACTERS)!r} is expected"


def check_informativeness(evidence: Evidence) -> CheckOutcome:
    """P11: Test if the teacher's signal prefers the student's right answers to its wrong ones."""
    if evidence.no_signal_reason:
        return skip_check(evidence.no_signal_reason)
    rows = [
        row
        for row in evidence.measurements
        if row.advantage is not None and row.rollout.reward is not None and len(row.rollout.tokens)
    ]
    if not rows:
        return skip_check("the task has no verifier, so no answer is known to be right")
    advantages = [row.advantage.mean().item() for row in rows if row.advantage is not None]
    logprobs = [row.teacher_event_logprobs for row in rows]
    levels = [values.mean().item() for values in logprobs if values is not None]
    is_right = [(row.rollout.reward or 0.0) >= 1.0 for row in rows]
    right, wrong = sum(is_right), len(is_right) - sum(is_right)
    if min(right, wrong) < MIN_OF_EACH:
        text = (
            f"{right} right and {wrong} wrong answers; {MIN_OF_EACH} of each are needed "
            "to compare the teacher's scores of them"
        )
        needs = _estimate_rollouts_needed(right, wrong)
        return CheckOutcome("inconclusive", text, rollouts_needed=needs)
    # Hanley and McNeil's interval takes rollouts as independent, the bootstrap over prompts is
    # unsure with few prompts: the wider bound of the two holds on either side.
    hanley = auroc(advantages, is_right)
    prompts = [row.rollout.prompt.id for row in rows]
    clustered = clustered_auroc(advantages, is_right, prompts, evidence.seed)
    assert hanley is not None and clustered is not None, "both kinds are there"
    area = Interval(hanley.mean, min(hanley.low, clustered.low), max(hanley.high, clustered.high))
    by_kind = group_pairs(zip(is_right, levels, strict=True))
    preference = sum(by_kind[True]) / right - sum(by_kind[False]) / wrong
    details = {"mean log T of right answers minus wrong": preference}
    status, needs = "inconclusive", None
    if area.high < 0.5:
        status, text = "fail", "the teacher's signal prefers the student's wrong answers"
    elif area.low > 0.5:
        status, text = "pass", "the teacher's signal prefers right answers"
    else:
        text = "so few answers do not show whether the teacher's signal prefers right answers"
        # An interval's width falls with the square root of the number of answers.
        ratio = (area.high - area.low) / 2 / max(abs(area.mean - 0.5), 1e-9)
        needs = max(min(math.ceil(len(rows) * ratio**2), MAX_ROLLOUTS), len(rows) + 1)
    return CheckOutcome(status, text, area, "AUROC", rollouts_needed=needs, details=details)


def check_pass_rates(evidence: Evidence) -> CheckOutcome:
    """P12: Count the prompts that the student solves sometimes; they teach most."""
    rewards = list(evidence.group_rewards(evidence.rollouts).values())
    if not rewards:
        return skip_check("the task has no verifier")
    if _has_lone_answers(evidence):
        text = "the reward compares the answers to a prompt, and each prompt has one answer"
        return CheckOutcome("fail", text, fix=("rollout.n=8",))
    if evidence.samples < 2:
        return skip_check("a pass rate needs more than one answer per prompt; use --samples 4")
    sometimes = sum(0.0 < sum(group) / len(group) < 1.0 for group in rewards)
    always = sum(min(group) >= 1.0 for group in rewards)
    share = wilson(float(sometimes), len(rewards))
    text = (
        f"of {len(rewards)} prompts the student solves {always} always, "
        f"{len(rewards) - sometimes - always} never, {sometimes} sometimes"
    )
    if share.mean >= MIN_SOLVED_SOMETIMES:
        return CheckOutcome("pass", text, share, "of prompts")
    if not sometimes and not any(term.needs_signal for term in evidence.plan.objective.losses):
        return CheckOutcome("fail", f"{text}: choose other prompts", share, "of prompts")
    # Weights by the pass rate leave out every prompt that is never solved.
    fix = override_terms(evidence.recipe, "samples=pass_rate") if sometimes else ()
    if sometimes and evidence.recipe.rollout.n == 1:
        fix += ("rollout.n=4",)
    return CheckOutcome("warn", text, share, "of prompts", fix)


def _has_lone_answers(evidence: Evidence) -> bool:
    """Return True if all that the objective learns from is a comparison of one answer with itself."""
    terms, rollout = evidence.plan.objective.losses, evidence.recipe.rollout
    advantages = [ADVANTAGES[term.signal.outcome] for term in terms if term.signal.outcome]
    return (
        evidence.plan.n == 1
        and not rollout.source.other_writers
        and len(advantages) == len(terms)
        and all(not rule.anchored and rule.function([1.0])[0] == 0.0 for rule in advantages)
    )


def _estimate_answers_needed(teacher: float, student: float) -> int:
    """Return the answers of each model that would show this gap, or 0.03 without one."""
    needed = rollouts_needed(teacher, student)
    if needed is None:
        accuracy = min(max(teacher, 0.05), 0.95)
        needed = rollouts_needed(accuracy + SAME_ACCURACY, accuracy) or MAX_ROLLOUTS
    return min(needed, MAX_ROLLOUTS)


def _estimate_rollouts_needed(right: int, wrong: int) -> int | None:
    """Return the rollouts that would give enough right and wrong answers at this rate.

    None if one kind is missing.
    """
    fewer = min(right, wrong)
    return math.ceil((right + wrong) * MIN_OF_EACH / fewer) if fewer else None
