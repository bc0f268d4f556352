"""Whether a claim holds, computed from results: nobody writes a verdict by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from practicum.evidence.results import Results
from practicum.evidence.study import Better, Claim, Cost, Reaches, Test, Tie
from practicum.statistics import Interval, t_interval

Answer = Literal["yes", "no", "unresolved", "missing"]
Verdict = Literal["holds", "holds in part", "does not hold here", "not resolved", "not run"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a test came to: its answer, and the number with its 95 % interval over seeds in words."""

    answer: Answer
    shown: str


def judged(claim: Claim, results: Results) -> tuple[Verdict, list[Judgement]]:
    """The verdict on a claim, and what each of its tests came to."""
    judgements = [judge(test, results) for test in claim.tests]
    return verdict([judgement.answer for judgement in judgements]), judgements


def verdict(answers: Sequence[Answer]) -> Verdict:
    """It holds where every test says so, in part where one does, and not at all where each denies it."""
    if all(answer == "missing" for answer in answers):
        return "not run"
    if all(answer == "yes" for answer in answers):
        return "holds"
    if "yes" in answers:
        return "holds in part"
    return "not resolved" if "unresolved" in answers or "missing" in answers else "does not hold here"


def judge(test: Test, results: Results) -> Judgement:
    """One test."""
    match test:
        case Better():
            return _better(test, results)
        case Tie():
            return _tie(test, results)
        case Reaches():
            return _reaches(test, results)
        case Cost():
            return _cost(test, results)


def _better(test: Better, results: Results) -> Judgement:
    values = _differences(test.better, test.than, test.measure, test.at, results)
    what = f"{test.better} - {test.than}, {_measured(test.measure, test.at)}"
    if not values:
        return Judgement("missing", f"{what}: not run")
    found = t_interval(values)
    if found is None:
        return Judgement("unresolved", f"{what}: {values[0]:+.3f} (one seed)")
    if found.low > 0 and found.mean >= test.by:
        answer: Answer = "yes"
    else:
        answer = "no" if found.high < test.by or (test.by == 0 and found.high <= 0) else "unresolved"
    return Judgement(answer, f"{what}: {_signed(found)}")


def _tie(test: Tie, results: Results) -> Judgement:
    one, other = test.tie
    values = _differences(one, other, test.measure, test.at, results)
    what = f"{one} - {other}, {_measured(test.measure, test.at)}"
    if not values:
        return Judgement("missing", f"{what}: not run")
    found = t_interval(values)
    if found is None:
        return Judgement("unresolved", f"{what}: {values[0]:+.3f} (one seed)")
    apart = found.low > test.within or found.high < -test.within
    within = -test.within <= found.low and found.high <= test.within
    return Judgement("yes" if within else "no" if apart else "unresolved", f"{what}: {_signed(found)}")


def _reaches(test: Reaches, results: Results) -> Judgement:
    values = list(results.values(test.reaches, test.measure, test.at).values())
    what = f"{test.reaches}, {_measured(test.measure, test.at)}"
    if not values:
        return Judgement("missing", f"{what}: not run")
    found = t_interval(values)
    if found is None:
        return Judgement("unresolved", f"{what}: {values[0]:.3f} (one seed)")
    least, most = test.least, test.most
    fits = (least is None or found.mean >= least) and (most is None or found.mean <= most)
    beyond = (least is not None and found.high < least) or (most is not None and found.low > most)
    return Judgement(
        "yes" if fits else "no" if beyond else "unresolved",
        f"{what}: {found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]",
    )


def _cost(test: Cost, results: Results) -> Judgement:
    """Seeds in which the dearer arm never arrives count with all that it spent, which is a lower bound."""
    dear = results.spent_until(test.cost, test.level, test.unit)
    cheap = results.spent_until(test.over, test.level, test.unit)
    whole = results.spent(test.cost, test.unit)
    what = f"{test.unit} of {test.cost} / {test.over} until accuracy {test.level:g}"
    seeds = sorted(dear.keys() & cheap.keys())
    if not seeds:
        return Judgement("missing", f"{what}: not run")
    if any(cheap[seed] is None for seed in seeds):
        return Judgement("unresolved", f"{what}: {test.over} does not arrive in every seed")
    ratios = [(dear[seed] or whole[seed]) / max(cheap[seed] or 0.0, 1e-9) for seed in seeds]
    never = sum(dear[seed] is None for seed in seeds)
    low, high = min(ratios), max(ratios)
    sign = "at least " if never else ""
    note = f"; {test.cost} does not arrive in {never} of {len(seeds)} seeds" if never else ""
    answer: Answer = "yes" if low >= test.factor else "unresolved" if never or len(seeds) < 2 else "no"
    if answer == "no" and high >= test.factor:
        answer = "unresolved"
    return Judgement(answer, f"{what}: {sign}{low:.1f} to {high:.1f}{note}")


def _differences(one: str, other: str, measure: str, at: str | int, results: Results) -> list[float]:
    mine: Mapping[int, float] = results.values(one, measure, at, (one, other))
    theirs: Mapping[int, float] = results.values(other, measure, at, (one, other))
    return [mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())]


def _measured(measure: str, at: str | int) -> str:
    place = {"end": "", "equal_flops": " at equal FLOPs"}.get(str(at), f" at step {at}")
    return f"{measure.replace('_', ' ')}{place}"


def _signed(found: Interval) -> str:
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
