"""From findings to one word, by the first rule that holds, and to an answer: supervised, on-policy, or reinforcement?"""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from practicum.studies.doctor.checks import Check
from practicum.studies.doctor.findings import CheckOutcome, format_interval

Word = Literal[
    "BROKEN-SETUP", "NO-GO", "NO-GAP", "COLD-START-FIRST", "GO-WITH-CHANGES", "INCONCLUSIVE", "GO"
]

LARGE_RATIO = 10.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check with what it found."""

    check: Check
    finding: CheckOutcome

    @property
    def failed(self) -> bool:
        """Whether it failed."""
        return self.finding.status == "fail"

    @property
    def asks_for_change(self) -> bool:
        """Whether its fix should be made: it warns or fails, and is more than a note."""
        return self.check.role != "note" and self.finding.status in ("warn", "fail")

    def line(self) -> str:
        """What it found, with its number, on one line."""
        number = format_interval(self.finding.value, self.finding.unit)
        return f"{self.check.id} {self.check.name}: {self.finding.sentence}{f' ({number})' if number else ''}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One verdict: when it holds of a result, what it means, and what the command line returns."""

    word: Word
    holds: Callable[[CheckResult], bool]
    when: str
    meaning: str
    exit_code: int


def _broken(result: CheckResult) -> bool:
    return result.check.role == "setup" and result.failed


def _misleads(result: CheckResult) -> bool:
    return result.failed and (result.check.id == "P11" or _below(result))


def _below(result: CheckResult) -> bool:
    return (
        result.check.id == "P10"
        and result.finding.value is not None
        and result.finding.value.high < 0
    )


def _no_gap(result: CheckResult) -> bool:
    return result.check.id == "P10" and result.failed and not _below(result)


def _cold(result: CheckResult) -> bool:
    return result.check.role == "start" and result.failed


def _changes(result: CheckResult) -> bool:
    return bool(result.finding.fix) and result.asks_for_change


def _open(result: CheckResult) -> bool:
    return result.check.id == "P10" and result.finding.status == "inconclusive"


RULES = (
    Rule(
        "BROKEN-SETUP",
        _broken,
        "P1, P2 or P4 fails",
        "the two models do not fit together as the recipe has them",
        20,
    ),
    Rule(
        "NO-GO",
        _misleads,
        "P11 fails, or P10 lies below 0",
        "this teacher would make the student worse",
        21,
    ),
    Rule(
        "NO-GAP",
        _no_gap,
        "P10 lies within 0.03 of 0, or the two say the same",
        "there is nothing to learn here",
        22,
    ),
    Rule(
        "COLD-START-FIRST",
        _cold,
        "P5 or P6 fails",
        "too far apart: begin with the teacher's answers",
        23,
    ),
    Rule(
        "GO-WITH-CHANGES",
        _changes,
        "a check warns or fails and has a fix",
        "run it with the changes below",
        0,
    ),
    Rule(
        "INCONCLUSIVE",
        _open,
        "P10 cannot be told from so few answers",
        "more answers are needed to know",
        24,
    ),
)
"""The verdicts in the order in which they are tried; where none holds, it is GO."""

GO = Rule("GO", lambda result: True, "otherwise", "nothing stands in the way", 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The word, why, and what to do with this pair on these prompts."""

    word: Word
    meaning: str
    exit_code: int
    because: list[str]
    advice: str


def decide(results: list[CheckResult], capacity: float | None) -> Verdict:
    """The first verdict that holds, with the findings that caused it."""
    for rule in RULES:
        caused = [result.line() for result in results if rule.holds(result)]
        if caused:
            return Verdict(
                rule.word,
                rule.meaning,
                rule.exit_code,
                caused,
                advise(rule.word, results, capacity),
            )
    known = [
        r.line()
        for r in results
        if r.check.role in ("teacher", "start") and r.finding.status == "pass"
    ]
    return Verdict(GO.word, GO.meaning, GO.exit_code, known, advise(GO.word, results, capacity))


def advise(word: Word, results: list[CheckResult], capacity: float | None) -> str:
    """Supervised (SFT), on-policy (OPD) or reinforcement learning (RL) for this pair on these prompts, in a few sentences."""
    found = {result.check.id: result.finding for result in results}
    status = {name: finding.status for name, finding in found.items()}
    rl = status.get("P12") in ("pass", "warn")
    if word == "BROKEN-SETUP":
        return _advise_setup_fixes(found)
    if status.get("P6") == "not applicable":
        return _without_teacher(rl)
    if word in ("NO-GO", "NO-GAP"):
        other = (
            "RL: the verifier sees right and wrong answers to the same prompts"
            if rl
            else "another teacher or other prompts"
        )
        return f"Not OPD with this teacher. What is left is {other}."
    if word == "COLD-START-FIRST":
        return "SFT on the teacher's answers first, then OPD from what comes of it."
    short = status.get("P16") == "warn"
    far = capacity is not None and capacity > LARGE_RATIO
    text = "OPD."
    if short and far:
        text = f"SFT instead: answers are short and the teacher is {capacity:.0f} times as large."
    elif short:
        text = "OPD will do; answers are short, so SFT on the teacher's answers may do as well, and it costs less."
    if status.get("P10") == "pass" and rl:
        text += " RL can follow, since some prompts are solved sometimes: it can go past the teacher, and needs many more answers."
    if status.get("P10") == "inconclusive":
        text += f" That the teacher is better is not shown: about {found['P10'].needs} answers of each model would tell."
    elif status.get("P10") == "not applicable":
        text += " Whether the teacher is better was not measured."
    return text


def _advise_setup_fixes(found: Mapping[str, CheckOutcome]) -> str:
    """What to write first where the setup is broken: the fixes of the setup's checks and of the template's."""
    setup = [found[name] for name in ("P1", "P2", "P3", "P4") if name in found]
    fixes = [
        change for finding in setup if finding.status in ("warn", "fail") for change in finding.fix
    ]
    return f"None yet: mend the setup{f' (write {shlex.join(fixes)})' if fixes else ''}, then ask again."


def _without_teacher(rl: bool) -> str:
    if rl:
        return "RL: nobody scores the tokens, and the verifier sees right and wrong answers to the same prompts."
    return "SFT, if there are answers to learn from: nobody scores the tokens, and the verifier cannot tell answers apart."
