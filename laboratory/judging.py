"""Whether a claim holds, computed from results: nobody writes a verdict by hand."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from laboratory.results import Results
from laboratory.study import (
    Better,
    Claim,
    Cost,
    Ratio,
    Reaches,
    Rises,
    Robust,
    Test,
    Tie,
    Warned,
)
from practicum.statistics import Interval, contains_zero, t_interval

Answer = Literal["yes", "no", "unresolved", "missing"]
Verdict = Literal["holds", "holds in part", "does not hold here", "not resolved", "not run"]

_SIGNED, _PLAIN = "{:+.3f}".format, "{:.3g}".format
"""How an interval is shown."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a test came to: its answer, and the number with its 95 % interval over seeds in words."""

    answer: Answer
    shown: str


def judge_claim(claim: Claim, results: Results) -> tuple[Verdict, list[Judgement]]:
    """The verdict on a claim, and what each of its tests came to."""
    judgements = [judge_test(test, results) for test in claim.tests]
    return verdict([judgement.answer for judgement in judgements]), judgements


def verdict(answers: Sequence[Answer]) -> Verdict:
    """It holds where every test says so, in part where one does, and not at all where each denies it."""
    if all(answer == "missing" for answer in answers):
        return "not run"
    if all(answer == "yes" for answer in answers):
        return "holds"
    if "yes" in answers:
        return "holds in part"
    return (
        "not resolved" if "unresolved" in answers or "missing" in answers else "does not hold here"
    )


def judge_test(test: Test, results: Results) -> Judgement:
    """One test."""
    match test:
        case Better():
            return _better(test, results)
        case Tie():
            return _tie(test, results)
        case Reaches():
            return _reaches(test, results)
        case Ratio():
            return _ratio(test, results)
        case Rises():
            return _rises(test, results)
        case Cost():
            return _cost(test, results)
        case Robust():
            return _robust(test, results)
        case Warned():
            return _warned(test, results)


def _over_seeds(
    what: str,
    values: Sequence[float],
    answer: Callable[[Interval], Answer],
    shown: Callable[[Interval], str],
) -> Judgement:
    """A number a seed as a judgement; a single seed decides nothing."""
    if not values:
        return Judgement("missing", f"{what}: not run")
    found = t_interval(values)
    if found is None:
        return Judgement(
            "unresolved",
            f"{what}: {shown(Interval(values[0], values[0], values[0])).split(' [')[0]} (one seed)",
        )
    return Judgement(answer(found), f"{what}: {shown(found)}")


def _better(test: Better, results: Results) -> Judgement:
    def answer(found: Interval) -> Answer:
        if found.low > 0 and found.mean >= test.by:
            return "yes"
        return "no" if found.high < test.by or (test.by == 0 and found.high <= 0) else "unresolved"

    what = f"{test.better} - {test.than}, {_measured(test.measure, test.at)}"
    return _over_seeds(
        what, _differences(test.better, test.than, test.measure, test.at, results), answer, _SIGNED
    )


def _tie(test: Tie, results: Results) -> Judgement:
    def answer(found: Interval) -> Answer:
        if -test.within <= found.low and found.high <= test.within:
            return "yes"
        return "no" if found.low > test.within or found.high < -test.within else "unresolved"

    one, other = test.tie
    what = f"{one} - {other}, {_measured(test.measure, test.at)}"
    return _over_seeds(
        what, _differences(one, other, test.measure, test.at, results), answer, _SIGNED
    )


def _reaches(test: Reaches, results: Results) -> Judgement:
    values = list(results.values(test.reaches, test.measure, test.at).values())
    what = f"{test.reaches}, {_measured(test.measure, test.at)}"
    shown = _share if test.measure.startswith(("accuracy", "pass@")) else _PLAIN
    return _over_seeds(what, values, lambda found: _bounded(found, test.least, test.most), shown)


def _bounded(found: Interval, least: float | None, most: float | None) -> Answer:
    """Whether the mean is on the right side of the bounds, or the whole interval on the wrong one."""
    if (least is not None and found.high < least) or (most is not None and found.low > most):
        return "no"
    fits = (least is None or found.mean >= least) and (most is None or found.mean <= most)
    return "yes" if fits else "unresolved"


def _ratio(test: Ratio, results: Results) -> Judgement:
    """The geometric mean over seeds; a numerator or denominator of nothing has no ratio."""
    mine, theirs = results.values(test.ratio, test.measure), results.values(test.over, test.measure)
    what = f"{test.ratio} / {test.over}, {_measured(test.measure, 'end')}"
    seeds = sorted(mine.keys() & theirs.keys())
    if not seeds:
        return Judgement("missing", f"{what}: not run")
    if any(mine[seed] <= 0 or theirs[seed] <= 0 for seed in seeds):
        return Judgement("unresolved", f"{what}: one of the two is 0 in some seed")
    logs = [math.log(mine[seed] / theirs[seed]) for seed in seeds]

    def answer(found: Interval) -> Answer:
        ratio = _exponential(found)
        bounded = _bounded(ratio, test.least, test.most)
        within = (test.least is None or ratio.low >= test.least) and (
            test.most is None or ratio.high <= test.most
        )
        return "unresolved" if bounded == "yes" and contains_zero(found) and not within else bounded

    return _over_seeds(what, logs, answer, lambda found: _PLAIN(_exponential(found)))


def _exponential(found: Interval) -> Interval:
    return Interval(math.exp(found.mean), math.exp(found.low), math.exp(found.high))


def _rises(test: Rises, results: Results) -> Judgement:
    end, start = (
        results.values(test.rises, test.measure),
        results.values(test.rises, test.measure, "start"),
    )
    values = [end[seed] - start[seed] for seed in sorted(end.keys() & start.keys())]

    def answer(found: Interval) -> Answer:
        return "yes" if found.low > test.by else "no" if found.high < test.by else "unresolved"

    return _over_seeds(
        f"{test.rises}, {_measured(test.measure, 'end')} from start to end", values, answer, _SIGNED
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
    if any(not cheap[seed] for seed in seeds):
        return Judgement("unresolved", f"{what}: {test.over} does not arrive in every seed")
    ratios = [(dear[seed] or whole[seed]) / (cheap[seed] or 1.0) for seed in seeds]
    never = sum(dear[seed] is None for seed in seeds)
    note = (
        f", at least, as {test.cost} does not arrive in {never} of {len(seeds)} seeds"
        if never
        else ""
    )
    shown = f"{what}: {min(ratios):.1f} to {max(ratios):.1f}{note}"
    return Judgement(_within(test, ratios, never) if len(seeds) > 1 else "unresolved", shown)


def _within(test: Cost, ratios: Sequence[float], never: int) -> Answer:
    """Whether every seed's ratio is as it should be, none is, or some; a lower bound denies nothing but a limit from above."""
    low, high = min(ratios), max(ratios)
    if test.most is not None and (never or low > test.most):
        return "no" if low > test.most else "unresolved"
    fits = (test.factor is None or low >= test.factor) and (test.most is None or high <= test.most)
    if fits:
        return "yes"
    return "no" if not never and test.factor is not None and high < test.factor else "unresolved"


def _robust(test: Robust, results: Results) -> Judgement:
    """From the sweep alone: one seed a learning rate."""
    scores = {
        row["learning_rate"]: row["accuracy"] or 0.0
        for row in results.tried
        if row["arm"] == test.robust
    }
    what = f"{test.robust}, over learning rates within a factor of {test.within:g}"
    if len(scores) < 2:
        return Judgement("missing", f"{what}: not run")
    best = max(scores, key=lambda rate: scores[rate])
    near = [
        score
        for rate, score in scores.items()
        if best / test.within <= rate * 1.001 and rate <= best * test.within * 1.001
    ]
    loss = scores[best] - min(near)
    answer: Answer = "yes" if loss <= test.loses and len(near) > 1 else "no"
    return Judgement(answer, f"{what}: {min(near):.2f} to {scores[best]:.2f}, best at {best:g}")


def _warned(test: Warned, results: Results) -> Judgement:
    found = results.doctor.get(test.warned)
    what = f"the doctor, before {test.warned}"
    if found is None:
        return Judgement("missing", f"{what}: not asked")
    because = "; ".join(found["because"])
    return Judgement(
        "yes" if found["verdict"] == test.verdict else "no",
        f"{what}: {found['verdict']}, {because}",
    )


def _differences(
    one: str, other: str, measure: str, at: str | int, results: Results
) -> list[float]:
    mine: Mapping[int, float] = results.values(one, measure, at, (one, other))
    theirs: Mapping[int, float] = results.values(other, measure, at, (one, other))
    return [mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())]


def _measured(measure: str, at: str | int) -> str:
    place = {"start": " at the start", "end": "", "equal_flops": " at equal FLOPs"}.get(
        str(at), f" at step {at}"
    )
    return f"{measure.replace('_', ' ')}{place}"


def _share(found: Interval) -> str:
    """A share of all answers, whose interval ends at 0 and 1."""
    return _PLAIN(Interval(found.mean, max(found.low, 0.0), min(found.high, 1.0)))
