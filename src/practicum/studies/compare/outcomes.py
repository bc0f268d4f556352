"""What the runs of a comparison came to, read from their folders, and what may be said of the arms.

Two arms are compared pair by pair: the runs of one seed with each other, and the answers to one held-out prompt with each
other. A difference is resolved when it stands over seeds (Student's paired t) and over prompts (sign flips), after Holm's
correction for the number of pairs; either test alone would take luck in the other for a result.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from practicum.errors import DataError
from practicum.report.tables import SPENT
from practicum.run_dir import read_json, read_rows, shapes
from practicum.statistics import (
    Interval,
    difference,
    group_pairs,
    holm,
    mean_of,
    repeats_needed,
    sign_flips,
    t_interval,
    t_test,
)
from practicum.statistics.repeats import LEVEL

SEED = 0
"""Of the bootstrap and the sign flips: the same runs give the same table."""

SHORT, COARSE = 0.98, 0.9
"""A run that spent less of its budget than this had no equal chance: where its `train.steps` ended it, and where the budget did.

A budget ends a run before the step that would exceed it, so that up to a step is left over.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """The held-out accuracy at a moment of a run, and what had been spent until then, by unit."""

    spent: Mapping[str, float]
    accuracy: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run. `scores` is the mean reward of each held-out prompt, by what was asked and expected.

    `by_budget` is whether the budget ended it, and not its `train.steps`.
    """

    arm: str
    seed: int
    folder: str
    accuracy: float | None
    reverse_kl: float | None
    spent: Mapping[str, float]
    scores: Mapping[str, float]
    curve: Sequence[Point]
    by_budget: bool = False


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A run that did not finish, and why, in one line."""

    arm: str
    seed: int
    reason: str


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One row of the table: means over the finished runs of an arm; `interval` is None for a single seed."""

    arm: str
    method: str
    finished: int
    failed: int
    mean: float | None
    interval: Interval | None
    reverse_kl: float | None
    spent: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ArmDifference:
    """`one` minus `other`, over the seeds and the prompts that both have; positive is better for `one`.

    `over_seeds` is None for fewer than two seeds, `over_prompts` where a metric has no values by prompt. `p` is the larger
    of both tests, after Holm's correction. `seeds_needed` and `prompts_needed` are for a difference like the one seen.
    """

    one: str
    other: str
    seeds: int
    mean: float
    over_seeds: Interval | None
    over_prompts: Interval | None
    p: float | None
    resolved: bool
    seeds_needed: int | None
    prompts: int
    prompts_needed: int | None


@dataclass(frozen=True, slots=True)
class ComparisonResult:
    """Everything a comparison came to; `metric` is what `mean` is about, higher is better unless it is reverse_kl."""

    metric: str
    arms: Sequence[ArmResult]
    pairs: Sequence[ArmDifference]
    outcomes: Sequence[Outcome]
    failures: Sequence[FailedRun]
    verdict: Sequence[str]


def read_outcome(arm: str, seed: int, folder: Path, home: Path) -> Outcome:
    """What a finished run left in its folder."""
    summary = read_json(folder / "summary.json", shapes.SUMMARY)
    after = read_json(folder / "after.json", shapes.AFTER)["student"]
    rows, seconds = list(read_rows(folder / "metrics.jsonl", shapes.METRICS)), _seconds(folder)
    spent: dict[str, float] = {}
    curve = []
    before = summary["before"]
    if before is not None and before["accuracy"] is not None:
        curve.append(Point({}, before["accuracy"]["mean"]))
    for row in rows:
        for unit, amount in _spent_in(row, seconds.get(row["step"], 0.0)).items():
            spent[unit] = spent.get(unit, 0.0) + amount
        if row.get("heldout_accuracy") is not None:
            curve.append(Point(dict(spent), row["heldout_accuracy"]))
    end = None if after is None or after["accuracy"] is None else after["accuracy"]["mean"]
    if end is not None and (not curve or curve[-1].spent != spent):
        curve.append(Point(dict(spent), end))
    return Outcome(
        arm=arm,
        seed=seed,
        folder=str(folder.relative_to(home)),
        accuracy=end,
        reverse_kl=None if after is None else after["reverse_kl"],
        spent=spent,
        scores={} if after is None else _scores(after["answers"]),
        curve=curve,
        by_budget=summary["ended"].startswith(SPENT),
    )


def _spent_in(row: Mapping[str, Any], seconds: float) -> dict[str, float]:
    """What one step cost, by unit."""
    return {
        "flops": row.get("cost/flops", 0.0),
        "tokens": row["tokens"],
        "seconds": seconds,
        "steps": 1.0,
    }


def _seconds(folder: Path) -> dict[int, float]:
    path = folder / "timings.jsonl"
    rows = read_rows(path, shapes.TIMINGS) if path.is_file() else ()
    return {
        row["step"]: sum(value for name, value in row.items() if name != "step") for row in rows
    }


def _scores(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean reward of each held-out prompt, by what was asked and what is expected."""
    rewards = group_pairs(
        (json.dumps([answer["prompt"], answer["question"], answer["expected"]]), answer["reward"])
        for answer in answers
        if answer["reward"] is not None
    )
    return {key: sum(values) / len(values) for key, values in rewards.items()}


def analyse_outcomes(
    methods: Mapping[str, str],
    outcomes: Sequence[Outcome],
    failures: Sequence[FailedRun],
    budget: Mapping[str, float],
) -> ComparisonResult:
    """The table, the pairs and the verdict; `methods` names every arm, `budget` what each run might spend, by unit."""
    metric = _metric(outcomes)
    arms = [_arm(name, method, outcomes, failures, metric) for name, method in methods.items()]
    wanted = list(combinations([arm.arm for arm in arms if arm.finished], 2))
    pairs = _corrected([_pair(one, other, outcomes, metric, len(wanted)) for one, other in wanted])
    verdict = [*_verdict(arms, pairs, metric), *_remarks(arms, outcomes, failures, budget)]
    return ComparisonResult(metric, arms, pairs, outcomes, failures, verdict)


def _metric(outcomes: Sequence[Outcome]) -> str:
    """Accuracy, or the divergence from the teacher where answers are not verified; DataError where a run has neither."""
    if all(outcome.accuracy is not None for outcome in outcomes):
        return "accuracy"
    if all(outcome.reverse_kl is not None for outcome in outcomes):
        return "reverse_kl"
    raise DataError(
        "the runs share no measure: the task does not verify answers, and not every arm has a teacher to be near to; "
        "compare on a task with a verifier"
    )


def _value(outcome: Outcome, metric: str) -> float:
    """The metric so that higher is better."""
    value = outcome.accuracy if metric == "accuracy" else outcome.reverse_kl
    assert value is not None, "a metric was chosen that every run has"
    return value if metric == "accuracy" else -value


def _arm(
    name: str, method: str, outcomes: Sequence[Outcome], failures: Sequence[FailedRun], metric: str
) -> ArmResult:
    mine = [outcome for outcome in outcomes if outcome.arm == name]
    values = [abs(_value(outcome, metric)) for outcome in mine]
    divergences = [outcome.reverse_kl for outcome in mine if outcome.reverse_kl is not None]
    units = list(dict.fromkeys(unit for outcome in mine for unit in outcome.spent))
    return ArmResult(
        arm=name,
        method=method,
        finished=len(mine),
        failed=sum(failure.arm == name for failure in failures),
        mean=mean_of(values),
        interval=t_interval(values),
        reverse_kl=mean_of(divergences),
        spent={unit: sum(outcome.spent[unit] for outcome in mine) / len(mine) for unit in units},
    )


def _pair(
    one: str, other: str, outcomes: Sequence[Outcome], metric: str, tests: int
) -> ArmDifference:
    """The two arms on what they share, before the correction for the number of pairs."""
    mine = {outcome.seed: outcome for outcome in outcomes if outcome.arm == one}
    theirs = {outcome.seed: outcome for outcome in outcomes if outcome.arm == other}
    seeds = sorted(mine.keys() & theirs.keys())
    by_seed = [_value(mine[seed], metric) - _value(theirs[seed], metric) for seed in seeds]
    by_prompt = (
        _by_prompt([(mine[seed].scores, theirs[seed].scores) for seed in seeds])
        if metric == "accuracy"
        else []
    )
    p_seeds = t_test(by_seed)
    p_prompts = sign_flips(by_prompt, SEED) if by_prompt else 0.0
    return ArmDifference(
        one=one,
        other=other,
        seeds=len(seeds),
        mean=mean_of(by_seed) or 0.0,
        over_seeds=t_interval(by_seed),
        over_prompts=difference(by_prompt, [0.0] * len(by_prompt), SEED) if by_prompt else None,
        p=None if p_seeds is None else max(p_seeds, p_prompts),
        resolved=False,
        seeds_needed=repeats_needed(by_seed, tests),
        prompts=len(by_prompt),
        prompts_needed=repeats_needed(by_prompt, tests),
    )


def _by_prompt(scores: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> list[float]:
    """The difference on each prompt that both arms answered, averaged over the seeds in which they did."""
    differences = group_pairs(
        (key, mine[key] - theirs[key]) for mine, theirs in scores for key in mine if key in theirs
    )
    return [sum(values) / len(values) for values in differences.values()]


def _corrected(pairs: Sequence[ArmDifference]) -> list[ArmDifference]:
    """The pairs with their p after Holm's correction; those of a single seed have none."""
    tested = [pair for pair in pairs if pair.p is not None]
    adjusted = holm([pair.p for pair in tested if pair.p is not None])
    done = [
        replace(pair, p=p, resolved=p < LEVEL) for pair, p in zip(tested, adjusted, strict=True)
    ]
    untested = [pair for pair in pairs if pair.p is None]
    return [*done, *untested]


def _verdict(arms: Sequence[ArmResult], pairs: Sequence[ArmDifference], metric: str) -> list[str]:
    """What may be said, the most important first: a sentence for the whole, then one for each pair."""
    if not pairs:
        return ["nothing to compare: fewer than two arms finished a run"]
    tested = [pair for pair in pairs if pair.p is not None]
    if not tested:
        whole = "single seed: how much seeds differ is unknown, so no difference is called resolved; write --seeds 3"
    elif not any(pair.resolved for pair in tested):
        whole = "no difference resolved"
    else:
        whole = _best(arms, tested, metric)
    return [whole, *(sentence(pair) for pair in pairs)]


def _best(arms: Sequence[ArmResult], pairs: Sequence[ArmDifference], metric: str) -> str:
    """Who leads, and whether it leads every other arm for certain."""
    ordered = sorted(
        (arm for arm in arms if arm.mean is not None),
        key=lambda arm: arm.mean or 0.0,
        reverse=metric == "accuracy",
    )
    first = ordered[0].arm
    own = [pair for pair in pairs if first in (pair.one, pair.other)]
    unsure = [pair.other if pair.one == first else pair.one for pair in own if not pair.resolved]
    if not unsure:
        return f"{first} is best, resolved against every other arm"
    return f"{first} leads, but no difference is resolved between it and {', '.join(unsure)}"


def sentence(pair: ArmDifference) -> str:
    """A pair in words, with the difference turned so that it is not negative."""
    if pair.seeds == 0:
        return f"{pair.one} and {pair.other} finished no seed in common"
    better, worse, sign = (
        (pair.one, pair.other, 1) if pair.mean >= 0 else (pair.other, pair.one, -1)
    )
    over = pair.over_seeds or pair.over_prompts
    shown = f"{sign * pair.mean:+.3f}" + ("" if over is None else f" {_bounds(over, sign)}")
    if pair.over_seeds is None:
        return f"{better} over {worse}: {shown} on a single seed (interval over prompts only)"
    if pair.resolved:
        return f"{better} is better than {worse}: {shown}, {_p(pair.p)}"
    return f"no difference resolved between {better} and {worse}: {shown}, {_p(pair.p)}{_describe_needed_repeats(pair)}"


def _bounds(interval: Interval, sign: int) -> str:
    low, high = sorted((sign * interval.low, sign * interval.high))
    return f"[{low:+.3f}, {high:+.3f}]"


def _p(p: float | None) -> str:
    """`p = 0.021`, `p < 0.001`."""
    return f"p = {shown_p(p)}".replace("= <", "< ")


def shown_p(p: float | None) -> str:
    """Three digits of a p value; nothing for None."""
    return "" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _describe_needed_repeats(pair: ArmDifference) -> str:
    """What it would take to resolve a difference like the one seen."""
    needed = []
    if pair.seeds_needed is not None and pair.seeds_needed > pair.seeds:
        needed.append(f"{pair.seeds_needed} seeds")
    if pair.prompts_needed is not None and pair.prompts_needed > pair.prompts:
        needed.append(f"{pair.prompts_needed} held-out prompts")
    return f"; a difference like this needs about {' and '.join(needed)}" if needed else ""


def _remarks(
    arms: Sequence[ArmResult],
    outcomes: Sequence[Outcome],
    failures: Sequence[FailedRun],
    budget: Mapping[str, float],
) -> list[str]:
    """What makes the comparison less than it should be: unequal spending, runs that failed."""
    lines = []
    for unit, amount in budget.items():
        for arm in arms:
            own = [outcome for outcome in outcomes if outcome.arm == arm.arm]
            least = min(own, key=lambda outcome: outcome.spent.get(unit, 0.0), default=None)
            share = 1.0 if least is None else least.spent.get(unit, 0.0) / amount
            if least is not None and share < (COARSE if least.by_budget else SHORT):
                why = (
                    "another step would be too much; make its steps smaller, or the budget larger"
                    if least.by_budget
                    else "its train.steps or a monitor end it; raise them, or turn that off"
                )
                lines.append(f"unequal: {arm.arm} spent {share:.0%} of the {unit}, because {why}")
    if failures:
        total = len(failures) + len(outcomes)
        lines.append(f"{len(failures)} of {total} runs failed and count nowhere")
        lines += [f"{failure.arm}, seed {failure.seed}, {failure.reason}" for failure in failures]
    return lines
