"""The results of a comparison's runs, read from their folders, and the statements that they
support.

Arms are compared in pairs: runs with the same seed, and rewards on the same held-out prompt. A
difference is resolved if it is significant over seeds (Student's paired t) and over prompts (sign
flips), after Holm's correction for the number of pairs. With only one of the two tests, chance in
seeds or prompts could pass for a result.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from practicum.core.options import spell_options
from practicum.errors import DataError
from practicum.report.cards import render_card
from practicum.report.tables import BUDGET_SPENT
from practicum.run_dir import read_json, read_rows, shapes
from practicum.run_dir.shapes import VerdictWord
from practicum.statistics import (
    FEWEST_PROMPTS,
    Interval,
    difference,
    group_pairs,
    has_width,
    holm,
    mean_of,
    repeats_needed,
    sign_flips,
    t_interval,
    t_test,
)
from practicum.statistics.repeats import LEVEL

SEED = 0
"""The seed of the bootstrap and the sign flips, so that the same runs give the same table."""

METRICS = ("accuracy", "reverse_kl", "reverse_kl_estimate")
"""The measures of a run, the preferred one first."""

MIN_SPENT, MIN_SPENT_BY_BUDGET = 0.98, 0.9
"""The shares of the budget below which a run had no equal chance: one that its `train.steps` ended,
and one that the budget ended.

A budget ends a run before the step that would exceed it, so that up to a step is left over.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """The held-out accuracy at a moment of a run, and the spending until then, by unit."""

    spent: Mapping[str, float]
    accuracy: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run.

    `verdict` is the run's own verdict. `scores` are the mean rewards of held-out prompts, by
    question and expected answer. `by_budget` is True if the budget ended the run, and not its
    `train.steps`.
    """

    arm: str
    seed: int
    folder: str
    verdict: VerdictWord
    accuracy: float | None
    reverse_kl: float | None
    spent: Mapping[str, float]
    scores: Mapping[str, float]
    curve: Sequence[Point]
    by_budget: bool = False
    reverse_kl_estimate: float | None = None


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A run that did not finish, with the reason in one line."""

    arm: str
    seed: int
    reason: str


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One row of the table: means over the finished runs of an arm.

    `verdicts` counts the verdicts of the runs. `interval` is None for a single seed.
    """

    arm: str
    method: str
    finished: int
    failed: int
    verdicts: Mapping[VerdictWord, int]
    mean: float | None
    interval: Interval | None
    reverse_kl: float | None
    spent: Mapping[str, float]
    reverse_kl_estimate: float | None = None


@dataclass(frozen=True, slots=True)
class ArmDifference:
    """The arm `one` minus the arm `other`, over the seeds and prompts of both; positive favours
    `one`.

    `over_seeds` is None for fewer than two seeds, `over_prompts` if the metric has no values by
    prompt. `p` is the larger p-value of both tests, after Holm's correction. `seeds_needed` and
    `prompts_needed` would resolve a difference of this size.
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


@dataclass(frozen=True, slots=True, repr=False)
class ComparisonResult:
    """The result of a comparison: table, pairs, runs and verdict.

    `metric` is accuracy (higher is better), or reverse_kl or its estimate (lower is better).
    """

    metric: str
    arms: Sequence[ArmResult]
    pairs: Sequence[ArmDifference]
    outcomes: Sequence[Outcome]
    failures: Sequence[FailedRun]
    verdict: Sequence[str]

    def __repr__(self) -> str:
        return f"ComparisonResult({', '.join(arm.arm for arm in self.arms)}: {self.verdict[0]})"

    def _repr_html_(self) -> str:
        """Return the verdict and the arms for a notebook."""
        rows = [
            [
                arm.arm,
                arm.method,
                f"{arm.finished} of {arm.finished + arm.failed}",
                "" if arm.mean is None else f"{arm.mean:.3f}",
            ]
            for arm in self.arms
        ]
        columns = ["arm", "method", "runs", self.metric.replace("_", " ")]
        return render_card(self.verdict[0], self.verdict[1:], columns, rows)

    def metrics(self) -> list[dict[str, Any]]:
        """Return a row for each finished run; `pandas.DataFrame(result.metrics())` is a table."""
        return [
            {
                "arm": outcome.arm,
                "seed": outcome.seed,
                "verdict": outcome.verdict,
                "accuracy": outcome.accuracy,
                "reverse_kl": outcome.reverse_kl,
                "reverse_kl_estimate": outcome.reverse_kl_estimate,
                **outcome.spent,
            }
            for outcome in self.outcomes
        ]


def read_outcome(arm: str, seed: int, folder: Path, parent: Path) -> Outcome:
    """Read the outcome of a finished run; the folder is stored relative to `parent`."""
    summary = read_json(folder / "summary.json", shapes.SUMMARY)
    student = read_json(folder / "after.json", shapes.AFTER)["student"]
    accuracy, reverse_kl, reverse_kl_estimate, scores = None, None, None, {}
    if student is not None:
        accuracy = None if student["accuracy"] is None else student["accuracy"]["mean"]
        reverse_kl, scores = student["reverse_kl"], _compute_scores(student["answers"])
        if student["reverse_kl_estimate"] is not None:
            reverse_kl_estimate = student["reverse_kl_estimate"]["mean"]
    curve = []
    before = summary["before"]
    if before is not None and before["accuracy"] is not None:
        curve.append(Point({}, before["accuracy"]["mean"]))
    spending: dict[str, float] = {}
    seconds = _read_seconds(folder)
    for row in read_rows(folder / "metrics.jsonl", shapes.METRICS):
        amounts = {
            "flops": row.get("cost/flops", 0.0),
            "tokens": row["tokens"],
            "seconds": seconds.get(row["step"], 0.0),
            "steps": 1.0,
        }
        spending = {unit: spending.get(unit, 0.0) + amount for unit, amount in amounts.items()}
        if row.get("heldout_accuracy") is not None:
            curve.append(Point(spending, row["heldout_accuracy"]))
    # The final evaluation adds a point only if the last step was not evaluated.
    if accuracy is not None and (not curve or curve[-1].spent != spending):
        curve.append(Point(spending, accuracy))
    return Outcome(
        arm=arm,
        seed=seed,
        folder=str(folder.relative_to(parent)),
        verdict=summary["verdict"]["verdict"],
        accuracy=accuracy,
        reverse_kl=reverse_kl,
        reverse_kl_estimate=reverse_kl_estimate,
        spent=spending,
        scores=scores,
        curve=curve,
        by_budget=summary["ended"].startswith(BUDGET_SPENT),
    )


def _read_seconds(folder: Path) -> dict[int, float]:
    """Return the seconds of each step over all phases; empty for a run without timings."""
    path = folder / "timings.jsonl"
    rows = read_rows(path, shapes.TIMINGS) if path.is_file() else ()
    return {
        row["step"]: sum(seconds for name, seconds in row.items() if name != "step") for row in rows
    }


def _compute_scores(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean reward of each held-out prompt, by its id, question and expected answer."""
    rewards = group_pairs(
        (json.dumps([answer["prompt"], answer["question"], answer["expected"]]), answer["reward"])
        for answer in answers
        if answer["reward"] is not None
    )
    return {prompt: sum(group) / len(group) for prompt, group in rewards.items()}


def compare_outcomes(
    methods: Mapping[str, str],
    outcomes: Sequence[Outcome],
    failures: Sequence[FailedRun],
    budget: Mapping[str, float],
) -> ComparisonResult:
    """Build the table, the pairs and the verdict.

    `methods` describes every arm by name, `budget` is the limit of each run, by unit. Raises
    DataError if the runs share no metric.
    """
    metric = _choose_metric(outcomes)
    arms = [
        _summarize_arm(name, method, outcomes, failures, metric) for name, method in methods.items()
    ]
    names = list(combinations([arm.arm for arm in arms if arm.finished], 2))
    pairs = _correct_pairs(
        [_compare_pair(first, second, outcomes, metric, len(names)) for first, second in names]
    )
    verdict = [*_build_verdict(arms, pairs, metric), *_list_flaws(arms, outcomes, failures, budget)]
    return ComparisonResult(metric, arms, pairs, outcomes, failures, verdict)


def _choose_metric(outcomes: Sequence[Outcome]) -> str:
    """Return the first measure that all runs have; DataError if they share none.

    An exact reverse KL and an estimate are no common measure: they are of different answers.
    """
    for metric in METRICS:
        if all(_get_metric(outcome, metric) is not None for outcome in outcomes):
            return metric
    if all(
        outcome.reverse_kl is not None or outcome.reverse_kl_estimate is not None
        for outcome in outcomes
    ):
        raise DataError(
            "the runs share no measure: some know the reverse KL exactly and some estimate it, on "
            "other answers; compare on a task with a verifier, or use the same kind of teacher"
        )
    raise DataError(
        "the runs share no measure: the task does not verify answers, "
        "and not every arm has a teacher to measure a distance to; compare on a task with a verifier"
    )


def _get_metric(outcome: Outcome, metric: str) -> float | None:
    return {
        "accuracy": outcome.accuracy,
        "reverse_kl": outcome.reverse_kl,
        "reverse_kl_estimate": outcome.reverse_kl_estimate,
    }[metric]


def _read_metric(outcome: Outcome, metric: str) -> float:
    """Return the metric of a run, signed so that higher is better."""
    number = _get_metric(outcome, metric)
    assert number is not None, "a metric was chosen that every run has"
    return number if metric == "accuracy" else -number


def _summarize_arm(
    name: str, method: str, outcomes: Sequence[Outcome], failures: Sequence[FailedRun], metric: str
) -> ArmResult:
    runs = [outcome for outcome in outcomes if outcome.arm == name]
    numbers = [number for run in runs if (number := _get_metric(run, metric)) is not None]
    divergences = [run.reverse_kl for run in runs if run.reverse_kl is not None]
    estimates = [run.reverse_kl_estimate for run in runs if run.reverse_kl_estimate is not None]
    units = list(dict.fromkeys(unit for run in runs for unit in run.spent))
    return ArmResult(
        arm=name,
        method=method,
        finished=len(runs),
        failed=sum(failure.arm == name for failure in failures),
        verdicts=dict(Counter(run.verdict for run in runs)),
        mean=mean_of(numbers),
        interval=t_interval(numbers),
        reverse_kl=mean_of(divergences),
        reverse_kl_estimate=mean_of(estimates),
        spent={unit: sum(run.spent[unit] for run in runs) / len(runs) for unit in units},
    )


def _compare_pair(
    first: str, second: str, outcomes: Sequence[Outcome], metric: str, tests: int
) -> ArmDifference:
    """Compare two arms on common seeds and prompts, before the correction for `tests` pairs."""
    first_runs = {outcome.seed: outcome for outcome in outcomes if outcome.arm == first}
    second_runs = {outcome.seed: outcome for outcome in outcomes if outcome.arm == second}
    seeds = sorted(first_runs.keys() & second_runs.keys())
    runs = [(first_runs[seed], second_runs[seed]) for seed in seeds]
    by_seed = [_read_metric(a, metric) - _read_metric(b, metric) for a, b in runs]
    by_prompt = _subtract_scores(runs) if metric == "accuracy" else []
    p_seeds = t_test(by_seed)
    p_prompts = sign_flips(by_prompt, SEED) if by_prompt else 0.0
    return ArmDifference(
        one=first,
        other=second,
        seeds=len(seeds),
        mean=mean_of(by_seed) or 0.0,
        over_seeds=t_interval(by_seed),
        over_prompts=difference(by_prompt, [0.0] * len(by_prompt), SEED) if by_prompt else None,
        # Both tests must reject, so the larger p-value is the p-value of the pair.
        p=None if p_seeds is None else max(p_seeds, p_prompts),
        resolved=False,
        seeds_needed=repeats_needed(by_seed, tests),
        prompts=len(by_prompt),
        prompts_needed=repeats_needed(by_prompt, tests),
    )


def _subtract_scores(runs: Sequence[tuple[Outcome, Outcome]]) -> list[float]:
    """Return the difference on each prompt of both arms, averaged over the common seeds."""
    differences = group_pairs(
        (prompt, score - second.scores[prompt])
        for first, second in runs
        for prompt, score in first.scores.items()
        if prompt in second.scores
    )
    return [sum(group) / len(group) for group in differences.values()]


def _correct_pairs(pairs: Sequence[ArmDifference]) -> list[ArmDifference]:
    """Return the pairs with p-values after Holm's correction, then those without a p-value."""
    tested = [pair for pair in pairs if pair.p is not None]
    adjusted = holm([pair.p for pair in tested if pair.p is not None])
    corrected = [
        replace(pair, p=p, resolved=p < LEVEL) for pair, p in zip(tested, adjusted, strict=True)
    ]
    return [*corrected, *(pair for pair in pairs if pair.p is None)]


def _build_verdict(
    arms: Sequence[ArmResult], pairs: Sequence[ArmDifference], metric: str
) -> list[str]:
    """Return the verdict: a sentence about all arms, then one for each pair."""
    if not pairs:
        return ["nothing to compare: fewer than two arms finished a run"]
    tested = [pair for pair in pairs if pair.p is not None]
    if not tested:
        verdict = (
            "single seed: how much seeds differ is unknown, "
            f"so no difference is called resolved; use {spell_options(seeds=3)}"
        )
    elif not any(pair.resolved for pair in tested):
        verdict = "no difference resolved"
    else:
        verdict = _describe_best(arms, tested, metric)
    return [verdict, *(describe_pair(pair) for pair in pairs)]


def _describe_best(arms: Sequence[ArmResult], pairs: Sequence[ArmDifference], metric: str) -> str:
    """Name the best arm, and the arms from which its difference is not resolved."""
    means = {arm.arm: arm.mean for arm in arms if arm.mean is not None}
    best = (max if metric == "accuracy" else min)(means, key=lambda name: means[name])
    unresolved = [
        pair.other if pair.one == best else pair.one
        for pair in pairs
        if best in (pair.one, pair.other) and not pair.resolved
    ]
    if not unresolved:
        return f"{best} is best, resolved against every other arm"
    return f"{best} leads, but no difference is resolved between it and {', '.join(unresolved)}"


def describe_pair(pair: ArmDifference) -> str:
    """Describe a pair in words, with the difference turned so that it is not negative."""
    if pair.seeds == 0:
        return f"{pair.one} and {pair.other} finished no seed in common"
    sign = 1 if pair.mean >= 0 else -1
    better, worse = (pair.one, pair.other) if sign > 0 else (pair.other, pair.one)
    numbers = f"{sign * pair.mean:+.3f}"
    has_few = pair.prompts < FEWEST_PROMPTS
    interval = pair.over_seeds or (None if has_few else pair.over_prompts)
    if interval is not None and has_width(interval.low, interval.high):
        low, high = sorted((sign * interval.low, sign * interval.high))
        numbers += f" [{low:+.3f}, {high:+.3f}]"
    elif pair.over_seeds is not None:
        numbers += f" in each of {pair.seeds} seeds, so no interval"
    if pair.over_seeds is None:
        return f"{better} over {worse}: {numbers} on a single seed ({_describe_prompts(pair)})"
    numbers += f", p = {format_p(pair.p)}".replace("= <", "< ")
    if pair.resolved:
        return f"{better} is better than {worse}: {numbers}"
    needs = _describe_needs(pair)
    return f"no difference resolved between {better} and {worse}: {numbers}{needs}"


def _describe_prompts(pair: ArmDifference) -> str:
    """Describe the evidence for a difference on a single seed."""
    if not pair.prompts:
        return "no interval"
    if pair.prompts < FEWEST_PROMPTS:
        return f"{pair.prompts} prompts: too few for an interval"
    return "interval over prompts only"


def format_p(p: float | None) -> str:
    """Format a p-value with three digits; nothing for None."""
    return "" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def _describe_needs(pair: ArmDifference) -> str:
    """Name the seeds and prompts that would resolve a difference of this size."""
    needed = []
    if (pair.seeds_needed or 0) > pair.seeds:
        needed.append(f"{pair.seeds_needed} seeds")
    if (pair.prompts_needed or 0) > pair.prompts:
        needed.append(f"{pair.prompts_needed} held-out prompts")
    return f"; a difference like this needs about {' and '.join(needed)}" if needed else ""


def _list_flaws(
    arms: Sequence[ArmResult],
    outcomes: Sequence[Outcome],
    failures: Sequence[FailedRun],
    budget: Mapping[str, float],
) -> list[str]:
    """Return facts that the table does not show: destroyed students, arms that spent less, failed
    runs."""
    lines = []
    for arm in arms:
        if collapsed := arm.verdicts.get("COLLAPSED", 0):
            count = f"{collapsed} of {arm.finished} run{'s' if arm.finished > 1 else ''}"
            lines.append(f"{arm.arm}: {count} destroyed the student (COLLAPSED)")
    for unit, amount in budget.items():
        for arm in arms:
            runs = [outcome for outcome in outcomes if outcome.arm == arm.arm]
            if not runs:
                continue
            cheapest = min(runs, key=lambda run: run.spent.get(unit, 0.0))
            share = cheapest.spent.get(unit, 0.0) / amount
            if share >= (MIN_SPENT_BY_BUDGET if cheapest.by_budget else MIN_SPENT):
                continue
            reason = (
                "one more step would exceed it; make its steps smaller, or the budget larger"
                if cheapest.by_budget
                else "its train.steps or a monitor end it; raise them, or turn that off"
            )
            lines.append(f"unequal: {arm.arm} spent {share:.0%} of the {unit}, because {reason}")
    if failures:
        total = len(failures) + len(outcomes)
        lines.append(f"{len(failures)} of {total} runs failed and count nowhere")
        lines += [f"{failure.arm}, seed {failure.seed}, {failure.reason}" for failure in failures]
    return lines
