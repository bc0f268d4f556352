"""The tables and lines that a run prints during training and at its end."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from practicum.costs import PHASES, BudgetTracker, format_bytes, format_flops
from practicum.recipe import Recipe
from practicum.statistics import FEWEST_PROMPTS, Estimate, Interval, has_width
from practicum.statistics.heldout import Evaluation
from practicum.text import make_printable
from practicum.types import Metrics, Rollout

ALL_DONE = "all steps done"
"""The value of `ended` in the summary of a run that did all of its `train.steps`."""

BUDGET_SPENT, FINISHED_BY = "budget spent", "finished by"
"""The beginning of `ended` if the budget ended the run, or a monitor with the action `finish`."""

MAX_PROMPTS, MAX_DOMAINS, WIDTH = 6, 8, 60
"""The number of held-out prompts in a table, the most domains in it, and the number of characters of each text."""

DRAFT_ROWS = {
    "tokens / target call": "drafts/tokens_per_call",
    "draft acceptance": "drafts/acceptance",
}
"""The readings of a drafter in a table, by their label."""


def build_comparison(
    before: Evaluation, after: Evaluation, teacher: Evaluation | None
) -> list[list[str]]:
    """Return one row per number, with the student before and after and its teacher side by side."""
    evaluations = [before, after, teacher]

    def build_row(name: str, show: Callable[[Evaluation], str]) -> list[str]:
        return [name, *("" if column is None else show(column) for column in evaluations)]

    def format_value(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    def build_measure_row(
        name: str,
        read_exact: Callable[[Evaluation], float | None],
        read_estimate: Callable[[Evaluation], Estimate | None],
    ) -> list[str]:
        if read_estimate(before) is None:
            return build_row(name, lambda column: format_value(read_exact(column), 3))
        return build_row(f"{name}, estimate", lambda column: str(read_estimate(column) or ""))

    return [
        build_row(
            "accuracy", lambda column: "" if column.accuracy is None else str(column.accuracy)
        ),
        *(
            build_row(
                f"accuracy, {_shorten(make_printable(domain))}",
                lambda column, domain=domain: str(column.by_domain.get(domain, "")),
            )
            for domain in (before.by_domain if 1 < len(before.by_domain) <= MAX_DOMAINS else ())
        ),
        build_measure_row(
            "reverse KL to teacher / token",
            lambda column: column.reverse_kl,
            lambda column: column.reverse_kl_estimate,
        ),
        build_measure_row(
            "entropy / token",
            lambda column: column.student_entropy,
            lambda column: column.student_entropy_estimate,
        ),
        *(
            build_row(row, lambda column, key=key: format_value(column.drafts.get(key), 2))
            for row, key in DRAFT_ROWS.items()
            if key in before.drafts
        ),
        build_row("tokens / answer", lambda column: format_value(column.length, 1)),
        build_row("cut off", lambda column: f"{column.truncated:.0%}"),
    ]


def describe_gain(gain: Interval, prompts: int) -> str:
    """Describe a gain with its interval, or state that there are too few prompts."""
    if prompts < FEWEST_PROMPTS:
        return f"{gain.mean:.2f} ({prompts} held-out prompts: too few for an interval)"
    if not has_width(gain.low, gain.high):
        return f"{gain.mean:.2f} (all prompts agree; no interval)"
    return f"{gain} (95 % interval, paired by prompt)"


def describe_lost_rows(lost_rows: Mapping[str, int]) -> str:
    """Describe the rows that could not be written, by the name of the journal."""
    parts = [f"{count} rows of {name}" for name, count in lost_rows.items()]
    return f"{', '.join(parts)} could not be written"


def pair_completions(before: Evaluation | None, after: Evaluation | None) -> list[dict[str, Any]]:
    """Return each held-out prompt with the completions before and after, and their rewards."""
    if before is None or after is None:
        return []
    return [
        {
            "prompt": old.question,
            "answer": old.expected,
            "before": old.text,
            "after": new.text,
            "reward_before": old.reward,
            "reward_after": new.reward,
            **({"pictures": old.pictures} if old.pictures else {}),
        }
        for old, new in zip(before.answers, after.answers, strict=True)
    ]


def build_completion_rows(
    samples: Sequence[dict[str, Any]], columns: Sequence[str]
) -> list[list[str]]:
    """Return the first rows of `pair_completions`, safe to print and short enough for a terminal."""
    return [
        [_shorten(make_printable(str(sample[column]))) for column in columns]
        for sample in samples[:MAX_PROMPTS]
    ]


def build_stage_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Return a row per stage of a pipeline: name, accuracy on all and by domain, steps, end."""
    ends = {stage["name"]: [str(stage["steps"]), stage["ended"]] for stage in summary["stages"]}

    def format_mean(interval: Mapping[str, float] | None) -> str:
        return "" if interval is None else f"{interval['mean']:.2f}"

    return [
        [
            row["stage"],
            format_mean(row["all"]),
            *(format_mean(row["by_domain"].get(domain)) for domain in summary["domains"]),
            *ends.get(row["stage"], ["", ""]),
        ]
        for row in summary["accuracy"]
    ]


def describe_cost(
    summary: Mapping[str, Any], recipe: Recipe, budget: BudgetTracker
) -> dict[str, str]:
    """Describe a run's cost: operations, bytes to other processes, money, and the budget's end.

    `budget` has the seconds and the bytes; the summary has no number that depends on the clock.
    """
    cost = summary["cost"]
    shares = ", ".join(
        f"{phase} {cost[phase]['flops'] / max(cost['flops'], 1.0):.0%}" for phase in PHASES
    )
    lines = {
        "cost": f"{format_flops(cost['flops'])} ({shares})"
        if cost["flops"]
        else "operations of models at a service are not counted"
    }
    if budget.wire_bytes:
        lines["wire"] = f"{format_bytes(budget.wire_bytes)} to and from other processes"
    prices = recipe.prices
    items = {} if prices is None else prices.compute_money(cost, budget.totals["seconds"])
    if prices is not None and items:
        amounts = ", ".join(f"{name} {amount:.4g}" for name, amount in items.items())
        currency = make_printable(prices.currency)
        lines["money"] = f"{sum(items.values()):.4g} {currency} ({amounts})"
    if summary["ended"] != ALL_DONE:
        step = f"step {summary['steps']} of {recipe.train.steps}"
        lines["ended"] = f"{summary['ended']}, after {step}"
    return lines


def _shorten(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


def format_sample(rollouts: Sequence[Rollout]) -> tuple[str, str]:
    """Return the first rollout's last message and its completion, safe to print."""
    return make_printable(rollouts[0].prompt.messages[-1].content), make_printable(rollouts[0].text)


def add_speed(metrics: Metrics) -> Metrics:
    """Return the metrics with the tokens per second of the whole step, for display."""
    seconds = sum(value for name, value in metrics.items() if name.startswith("seconds_"))
    return metrics | {"tokens_per_second": metrics["tokens"] / max(seconds, 1e-9)}
