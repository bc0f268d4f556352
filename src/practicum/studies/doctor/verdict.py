"""The verdict: one word by the first rule that holds, and advice between SFT, OPD and RL."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from practicum.runs.check_outcome import CheckOutcome
from practicum.studies.doctor.checks import Check
from practicum.studies.doctor.findings import format_interval
from practicum.studies.doctor.teachability import MIN_UNREWARDED, TEACHER_ACCURACY, UNREWARDED

Word = Literal[
    "BROKEN-SETUP",
    "NO-REWARD",
    "NO-GO",
    "NO-GAP",
    "COLD-START-FIRST",
    "CHANGE-FIRST",
    "INCONCLUSIVE",
    "GO",
]

LARGE_RATIO = 10.0
"""Weights of the teacher over the student's from which SFT comes before OPD for short answers
(arXiv 2604.00626)."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check with its outcome."""

    check: Check
    outcome: CheckOutcome

    @property
    def has_failed(self) -> bool:
        """True if the check failed."""
        return self.outcome.status == "fail"

    @property
    def needs_change(self) -> bool:
        """True if the fix should be made: the check warns or fails, and is more than a note."""
        return self.check.role != "note" and self.outcome.status in ("warn", "fail")

    def render_line(self) -> str:
        """Return the sentence of the check with its number, on one line."""
        number = format_interval(self.outcome.value, self.outcome.unit)
        suffix = f" ({number})" if number else ""
        return f"{self.check.id} {self.check.name}: {self.outcome.sentence}{suffix}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One verdict: its condition on a check's result, its meaning, and its exit code."""

    word: Word
    holds: Callable[[CheckResult], bool]
    when: str
    meaning: str
    exit_code: int


def _is_below_student(result: CheckResult) -> bool:
    gap = result.outcome.value
    return result.check.id == "P10" and gap is not None and gap.high < 0


def _is_no_gap(result: CheckResult) -> bool:
    return result.check.id == "P10" and result.has_failed and not _is_below_student(result)


def _has_no_reward(result: CheckResult) -> bool:
    return result.check.id == "P10" and UNREWARDED in result.outcome.details


def _has_no_right_answer(result: CheckResult) -> bool:
    return result.check.id == "P10" and result.outcome.details.get(TEACHER_ACCURACY) == 0.0


# The order decides the verdict: a broken setup makes every number below it meaningless, a teacher
# without a gap makes changes pointless, and changes come before more answers, since they change the
# answers. Warnings never change the word: in `benchmarks.verdicts` healthy setups have as many.
RULES = (
    Rule(
        "BROKEN-SETUP",
        lambda result: result.check.role == "setup" and result.has_failed,
        "P1, P2 or P4 fails",
        "the two models are incompatible in this recipe",
        20,
    ),
    Rule(
        "NO-REWARD",
        _has_no_reward,
        f"no answer of student or teacher is right, of {MIN_UNREWARDED} or more of each",
        "the verifier, the answer format or the length limit may be wrong; no answer can be judged",
        25,
    ),
    Rule(
        "NO-GO",
        lambda result: (
            result.has_failed and (result.check.id == "P11" or _is_below_student(result))
        ),
        "P11 fails, or P10 lies below 0",
        "this teacher would make the student worse",
        21,
    ),
    Rule(
        "NO-GAP",
        _is_no_gap,
        "P10 lies within 0.03 of 0, or both models give the same answers",
        "there is nothing to learn here",
        22,
    ),
    Rule(
        "COLD-START-FIRST",
        lambda result: result.check.role == "start" and result.has_failed,
        "P5 or P6 fails",
        "too far apart: begin with the teacher's answers",
        23,
    ),
    Rule(
        "INCONCLUSIVE",
        _has_no_right_answer,
        "the teacher gave no right answer",
        "nothing shows that this teacher can do the task: use more prompts, or other prompts",
        24,
    ),
    Rule(
        "CHANGE-FIRST",
        lambda result: result.needs_change and result.has_failed,
        "another check fails",
        "make the changes below before the run",
        26,
    ),
    Rule(
        "INCONCLUSIVE",
        lambda result: result.check.id == "P10" and result.outcome.status == "inconclusive",
        "P10 is undecided with so few answers",
        "more answers are needed to know",
        24,
    ),
)
"""The verdicts in the order in which they are tried; if none holds, the verdict is GO."""

GO = Rule(
    "GO",
    # GO rests on the checks of teacher and start; without them the verdict is still GO.
    lambda result: result.check.role in ("teacher", "start") and result.outcome.status == "pass",
    "otherwise",
    "no check failed",
    0,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The word, its meaning, the checks that caused it, and advice for this pair."""

    word: Word
    meaning: str
    exit_code: int
    because: list[str]
    advice: str


def decide(results: list[CheckResult], capacity: float | None) -> Verdict:
    """Return the first verdict that holds, with the results that caused it.

    `capacity` is the number of weights of the teacher over the student's; None if unknown.
    """
    causes = {rule: [result for result in results if rule.holds(result)] for rule in (*RULES, GO)}
    rule = next((rule for rule in RULES if causes[rule]), GO)
    lines = [result.render_line() for result in causes[rule]]
    advice = suggest_method(rule.word, results, capacity)
    return Verdict(rule.word, rule.meaning, rule.exit_code, lines, advice)


def suggest_method(word: Word, results: list[CheckResult], capacity: float | None) -> str:
    """Advise supervised (SFT), on-policy (OPD) or reinforcement learning (RL)."""
    findings = {result.check.id: result.outcome for result in results}
    status = {name: finding.status for name, finding in findings.items()}
    solved = findings["P12"].value if "P12" in findings else None
    can_use_rl = status.get("P12") in ("pass", "warn") and solved is not None and solved.mean > 0
    if word == "BROKEN-SETUP":
        return _suggest_setup_fixes(findings)
    if word == "NO-REWARD":
        return "None yet: grade an answer by hand, then run the doctor again."
    if status.get("P6") == "not applicable":
        if can_use_rl:
            return (
                "RL: no teacher scores the tokens, "
                "and the verifier sees right and wrong answers per prompt."
            )
        return (
            "SFT, if there are answers to learn from: no teacher scores the tokens, "
            "and the verifier gives all answers the same reward."
        )
    if word in ("NO-GO", "NO-GAP"):
        alternative = (
            "RL: the verifier sees right and wrong answers to the same prompts"
            if can_use_rl
            else "another teacher or other prompts"
        )
        return f"Not OPD with this teacher. What is left is {alternative}."
    if word == "COLD-START-FIRST":
        return "SFT on the teacher's answers first, then OPD from the resulting student."
    text = "OPD."
    if status.get("P16") == "warn":
        text = (
            f"SFT instead: answers are short and the teacher is {capacity:.0f} times as large."
            if capacity is not None and capacity > LARGE_RATIO
            else "OPD should work; answers are short, so SFT on the teacher's answers may work as well, "
            "and it costs less."
        )
    if status.get("P10") == "pass" and can_use_rl:
        text += (
            " RL can follow, since some prompts are solved sometimes: "
            "it can go past the teacher, and needs many more answers."
        )
    if status.get("P10") == "inconclusive":
        text += (
            " The measured gap does not show that the teacher is better; "
            f"a decision needs about {findings['P10'].rollouts_needed} answers per model."
        )
    elif status.get("P10") == "not applicable":
        text += " Whether the teacher is better was not measured."
    return text


def _suggest_setup_fixes(findings: Mapping[str, CheckOutcome]) -> str:
    """Return the advice for a broken setup: the fixes of P1 to P4."""
    setup = [findings[name] for name in ("P1", "P2", "P3", "P4") if name in findings]
    faulty = [finding for finding in setup if finding.status in ("warn", "fail")]
    fixes = [change for finding in faulty for change in finding.fix]
    command = f" (set {shlex.join(fixes)})" if fixes else ""
    return f"None yet: fix the setup{command}, then run the doctor again."
