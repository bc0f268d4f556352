"""Compute the verdict on each claim from results; no verdict is written by hand."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import Any, Literal

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
    get_arms,
)
from practicum.statistics import Interval, contains_zero, t_interval, t_test

Answer = Literal["yes", "no", "contrary", "unresolved", "missing"]
Verdict = Literal[
    "holds",
    "holds in part",
    "does not hold here",
    "the contrary holds here",
    "not resolved",
    "not run",
]

_SIGNED, _PLAIN = "{:+.3f}".format, "{:.3g}".format
"""Formats of an interval."""

UNTRAINED = 0.01
"""The share of an arm's operations below which another arm counts as untrained."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of a test: its answer, and a line with its number and 95 % interval over seeds.

    `p` is the two-sided p of no difference over seeds; None for a test without a difference.
    """

    answer: Answer
    text: str
    p: float | None = None


def judge_claim(claim: Claim, results: Results) -> tuple[Verdict, list[Judgement]]:
    """Return the verdict on a claim, and the judgement of each of its tests."""
    judgements = [judge_test(test, results) for test in _add_equal_costs(claim.tests, results)]
    return combine_answers([judgement.answer for judgement in judgements]), judgements


def _add_equal_costs(tests: Sequence[Test], results: Results) -> list[Test]:
    """Return the tests, and each comparison after equal steps also at equal operations."""
    added = []
    for test in tests:
        if not isinstance(test, Better | Tie) or test.at != "end" or test.measure != "accuracy":
            continue
        if results.curves.keys() >= {*get_arms(test)} and _can_compare_costs(test, results):
            added.append(test.model_copy(update={"at": "equal_flops"}))
    return [*tests, *(test for test in added if test not in tests)]


def _can_compare_costs(test: Better | Tie, results: Results) -> bool:
    """Return False if one arm was hardly trained, such as a mean of weights: its cost says nothing about the rest."""
    totals = [results.get_total_spending(arm, "flops").values() for arm in get_arms(test)]
    least, most = sorted(fmean(total) for total in totals)
    return least >= UNTRAINED * most


def combine_answers(answers: Sequence[Answer]) -> Verdict:
    """Return the verdict of all tests: the first decides, and later ones limit a claim that holds."""
    if all(answer == "missing" for answer in answers):
        return "not run"
    if all(answer == "yes" for answer in answers):
        return "holds"
    by_first: dict[Answer, Verdict] = {
        "yes": "holds in part",
        "no": "does not hold here",
        "contrary": "the contrary holds here",
    }
    return by_first.get(answers[0], "not resolved")


def judge_test(test: Test, results: Results) -> Judgement:
    """Judge one test; a test is `missing` if its arms did not run."""
    return _JUDGES[type(test)](test, results)


def _judge_interval(
    label: str,
    values: Sequence[float],
    decide: Callable[[Interval], Answer],
    render: Callable[[Interval], str],
) -> Judgement:
    """Judge one number per seed by its interval; a single seed has no interval and is unresolved.

    Two equal numbers are also unresolved: the zero width of their interval only shows that the measure is coarse.
    """
    if not values:
        return Judgement("missing", f"{label}: not run")
    interval = t_interval(values)
    if interval is None or (len(values) == 2 and values[0] == values[1]):
        mean = render(Interval(values[0], values[0], values[0])).split(" [")[0]
        seeds = "one seed" if interval is None else "two equal seeds"
        return Judgement("unresolved", f"{label}: {mean} ({seeds})")
    # Seeds that are all equal show that the measure is coarse, and have no p.
    p = None if interval.low == interval.high else t_test(values)
    return Judgement(decide(interval), f"{label}: {render(interval)}", p)


def _judge_better(test: Better, results: Results) -> Judgement:
    def decide(interval: Interval) -> Answer:
        if interval.low > 0 and interval.mean >= test.by:
            return "yes"
        if interval.high < 0:
            return "contrary"
        is_worse = interval.high < test.by or (test.by == 0 and interval.high <= 0)
        return "no" if is_worse else "unresolved"

    return _judge_difference((test.better, test.than), test, results, decide)


def _judge_tie(test: Tie, results: Results) -> Judgement:
    def decide(interval: Interval) -> Answer:
        # A margin of half the rise or more would call anything a tie.
        if test.within >= _measure_rise(test.tie, test.measure, results) / 2:
            return "unresolved"
        if -test.within <= interval.low and interval.high <= test.within:
            return "yes"
        is_apart = interval.low > test.within or interval.high < -test.within
        return "no" if is_apart else "unresolved"

    return _judge_difference(test.tie, test, results, decide)


def _measure_rise(arms: tuple[str, str], measure: str, results: Results) -> float:
    """Return the larger mean rise of two arms from start to end; infinite if it is not known."""
    if measure != "accuracy":
        return math.inf
    ends = (results.get_values(arm, measure) for arm in arms)
    starts = (results.get_values(arm, measure, "start") for arm in arms)
    rises = [_subtract(end, start) for end, start in zip(ends, starts, strict=True)]
    return max((fmean(rise) for rise in rises if rise), default=math.inf)


def _judge_difference(
    arms: tuple[str, str],
    test: Better | Tie,
    results: Results,
    decide: Callable[[Interval], Answer],
) -> Judgement:
    label = f"{arms[0]} - {arms[1]}, {_format_measure(test.measure, test.at)}"
    first, second = (results.get_values(arm, test.measure, test.at, arms) for arm in arms)
    return _judge_interval(label, _subtract(first, second), decide, _SIGNED)


def _judge_reaches(test: Reaches, results: Results) -> Judgement:
    values = list(results.get_values(test.reaches, test.measure, test.at).values())
    label = f"{test.reaches}, {_format_measure(test.measure, test.at)}"
    render = _format_share if test.measure.startswith(("accuracy", "pass@")) else _PLAIN

    def decide(interval: Interval) -> Answer:
        answer = _check_bounds(interval, test.least, test.most)
        is_within = (test.least is None or interval.low >= test.least) and (
            test.most is None or interval.high <= test.most
        )
        return "unresolved" if answer == "yes" and not is_within else answer

    return replace(_judge_interval(label, values, decide, render), p=None)


def _check_bounds(interval: Interval, least: float | None, most: float | None) -> Answer:
    """Answer yes if the mean is within the bounds, and no if the interval is outside of them."""
    if (least is not None and interval.high < least) or (most is not None and interval.low > most):
        return "no"
    fits = (least is None or interval.mean >= least) and (most is None or interval.mean <= most)
    return "yes" if fits else "unresolved"


def _judge_ratio(test: Ratio, results: Results) -> Judgement:
    """Judge the geometric mean of the seeds' ratios; a 0 in any of them has no ratio."""
    numerators = results.get_values(test.ratio, test.measure)
    denominators = results.get_values(test.over, test.measure)
    label = f"{test.ratio} / {test.over}, {_format_measure(test.measure, 'end')}"
    seeds = sorted(numerators.keys() & denominators.keys())
    if any(numerators[seed] <= 0 or denominators[seed] <= 0 for seed in seeds):
        return Judgement("unresolved", f"{label}: one of the two is 0 in some seed")
    logs = [math.log(numerators[seed] / denominators[seed]) for seed in seeds]

    def decide(log_interval: Interval) -> Answer:
        ratio = _invert_log(log_interval)
        answer = _check_bounds(ratio, test.least, test.most)
        is_within = (test.least is None or ratio.low >= test.least) and (
            test.most is None or ratio.high <= test.most
        )
        # A mean within the bounds is no evidence if the interval contains a ratio of 1 and more.
        is_noise = contains_zero(log_interval) and not is_within
        return "unresolved" if answer == "yes" and is_noise else answer

    return _judge_interval(
        label, logs, decide, lambda log_interval: _PLAIN(_invert_log(log_interval))
    )


def _invert_log(interval: Interval) -> Interval:
    return Interval(math.exp(interval.mean), math.exp(interval.low), math.exp(interval.high))


def _judge_rises(test: Rises, results: Results) -> Judgement:
    end = results.get_values(test.rises, test.measure)
    start = results.get_values(test.rises, test.measure, "start")

    def decide(interval: Interval) -> Answer:
        if interval.low > test.by:
            return "yes"
        return "no" if interval.high < test.by else "unresolved"

    label = f"{test.rises}, {_format_measure(test.measure, 'end')} from start to end"
    return _judge_interval(label, _subtract(end, start), decide, _SIGNED)


def _judge_cost(test: Cost, results: Results) -> Judgement:
    """Judge the ratio of two arms' spending until a level.

    If the expensive arm never reaches the level, its total spending gives a lower bound. An arm that
    begins at the level decides nothing.
    """
    expensive = results.get_spending_until(test.cost, test.level, test.unit)
    cheap = results.get_spending_until(test.over, test.level, test.unit)
    totals = results.get_total_spending(test.cost, test.unit)
    label = f"{test.unit} of {test.cost} / {test.over} until accuracy {test.level:g}"
    seeds = sorted(expensive.keys() & cheap.keys())
    if not seeds:
        return Judgement("missing", f"{label}: not run")
    for arm, spending in ((test.cost, expensive), (test.over, cheap)):
        if num_there := sum(spending[seed] == 0.0 for seed in seeds):
            text = f"{label}: {arm} begins there in {num_there} of {len(seeds)} seeds"
            return Judgement("unresolved", text)
    if any(cheap[seed] is None for seed in seeds):
        return Judgement("unresolved", f"{label}: {test.over} does not arrive in every seed")
    ratios = [(expensive[seed] or totals[seed]) / (cheap[seed] or 1.0) for seed in seeds]
    never = sum(expensive[seed] is None for seed in seeds)
    text = f"{label}: {min(ratios):.1f} to {max(ratios):.1f}"
    if never:
        text += f", at least, as {test.cost} does not arrive in {never} of {len(seeds)} seeds"
    return Judgement(_check_cost(test, ratios, never) if len(seeds) > 1 else "unresolved", text)


def _check_cost(test: Cost, ratios: Sequence[float], never: int) -> Answer:
    """Answer yes if every seed's ratio is within the test's bounds, and no if none is."""
    # With lower bounds (`never`) the true ratios may be larger: enough to exceed `most`, but never
    # to fall short of `factor`.
    low, high = min(ratios), max(ratios)
    if test.most is not None and (never or low > test.most):
        return "no" if low > test.most else "unresolved"
    fits = (test.factor is None or low >= test.factor) and (test.most is None or high <= test.most)
    if fits:
        return "yes"
    return "no" if not never and test.factor is not None and high < test.factor else "unresolved"


def _judge_robust(test: Robust, results: Results) -> Judgement:
    """Judge the sweep: what an arm loses to its best learning rate, paired by seed, at the rates near it.

    A failed run is a zero.
    """
    rows = {row["learning_rate"]: row for row in results.tried if row["arm"] == test.robust}
    label = f"{test.robust}, over learning rates within a factor of {test.within:g}"
    if len(rows) < 2:
        return Judgement("missing", f"{label}: not run")
    seeds = list(dict.fromkeys(chain.from_iterable(row["by_seed"] for row in rows.values())))
    by_rate = {
        rate: [row["by_seed"].get(seed, 0.0) for seed in seeds] for rate, row in rows.items()
    }
    scores = {rate: fmean(values) for rate, values in by_rate.items()}
    best = max(scores, key=lambda rate: scores[rate])
    # 0.1 % of tolerance: learning rates are decimal fractions, and 0.003 / 3 is not quite 0.001.
    neighbours = {
        rate: score
        for rate, score in scores.items()
        if best / test.within <= rate * 1.001 and rate <= best * test.within * 1.001
    }
    text = f"{label}: {min(neighbours.values()):.2f} to {scores[best]:.2f}, best at {best:g}"
    intervals = [
        t_interval([most - value for most, value in zip(by_rate[best], by_rate[rate], strict=True)])
        for rate in neighbours
        if rate != best
    ]
    missing = [
        side
        for side, rate in (("lower", min(neighbours)), ("higher", max(neighbours)))
        if rate == best
    ]
    if any(interval is not None and interval.low > test.loses for interval in intervals):
        return Judgement("no", text)
    if missing:
        return Judgement("unresolved", f"{text}; no {' or '.join(missing)} rate was tried there")
    is_robust = all(interval is not None and interval.high <= test.loses for interval in intervals)
    return Judgement("yes" if is_robust else "unresolved", text)


def _judge_warned(test: Warned, results: Results) -> Judgement:
    diagnosis = results.doctor.get(test.warned)
    label = f"the doctor, before {test.warned}"
    if diagnosis is None:
        return Judgement("missing", f"{label}: not asked")
    text = f"{label}: {diagnosis['verdict']}, {'; '.join(diagnosis['because'])}"
    return Judgement("yes" if diagnosis["verdict"] == test.verdict else "no", text)


def _subtract(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """Return the differences of the seeds that both have."""
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def _format_measure(measure: str, at: str | int) -> str:
    times = {"start": " at the start", "end": "", "equal_flops": " at equal FLOPs"}
    return f"{measure.replace('_', ' ')}{times.get(str(at), f' at step {at}')}"


def _format_share(interval: Interval) -> str:
    """Format a share, with its interval clamped to [0, 1]."""
    return _PLAIN(Interval(interval.mean, max(interval.low, 0.0), min(interval.high, 1.0)))


_JUDGES: Mapping[type[Test], Callable[[Any, Results], Judgement]] = {
    Better: _judge_better,
    Tie: _judge_tie,
    Reaches: _judge_reaches,
    Ratio: _judge_ratio,
    Rises: _judge_rises,
    Cost: _judge_cost,
    Robust: _judge_robust,
    Warned: _judge_warned,
}
"""The judge of each kind of test."""
