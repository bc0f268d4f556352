"""What a run shows at its end and while it goes on, as rows of text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from practicum.costs import PHASES, BudgetTracker
from practicum.recipe import Recipe
from practicum.text import make_printable
from practicum.training.evaluation import Evaluation
from practicum.types import Metrics, Rollout

ALL_DONE = "all steps done"
"""What `ended` says in the summary of a run that did all of its `train.steps`."""

SPENT, FINISHED = "budget spent", "finished by"
"""How `ended` begins in the summary of a run that its budget ended, and of one that a monitor ended with the action `finish`."""

SHOWN, WIDTH = 6, 60
"""How many held-out prompts a table shows, and how much of each text."""


def comparison(
    before: Evaluation, after: Evaluation, teacher: Evaluation | None
) -> list[list[str]]:
    """One row a number, with the student before and after and its teacher side by side."""
    columns = [before, after, teacher]

    def cells(name: str, show: Callable[[Evaluation], str]) -> list[str]:
        return [name, *("" if column is None else show(column) for column in columns)]

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    return [
        cells("accuracy", lambda column: "" if column.accuracy is None else str(column.accuracy)),
        cells("reverse KL to teacher / token", lambda column: number(column.reverse_kl, 3)),
        cells("entropy / token", lambda column: number(column.student_entropy, 3)),
        cells("tokens / answer", lambda column: number(column.length, 1)),
        cells("cut off", lambda column: f"{column.truncated:.0%}"),
    ]


def side_by_side(before: Evaluation | None, after: Evaluation | None) -> list[dict[str, Any]]:
    """Each held-out prompt with both answers and their rewards."""
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
        }
        for old, new in zip(before.answers, after.answers, strict=True)
    ]


def answers(samples: Sequence[dict[str, Any]], columns: Sequence[str]) -> list[list[str]]:
    """The first few of `side_by_side`, safe to print and short enough for a terminal."""
    return [
        [_short(make_printable(str(sample[column]))) for column in columns]
        for sample in samples[:SHOWN]
    ]


def accuracy_by_stage(summary: Mapping[str, Any]) -> list[list[str]]:
    """One row a stage of a pipeline's summary: its name, the accuracy on all and on each domain, its steps and how it ended."""
    ends = {stage["name"]: [str(stage["steps"]), stage["ended"]] for stage in summary["stages"]}

    def mean(interval: Mapping[str, float] | None) -> str:
        return "" if interval is None else f"{interval['mean']:.2f}"

    return [
        [
            row["stage"],
            mean(row["all"]),
            *(mean(row["by_domain"].get(domain)) for domain in summary["domains"]),
            *ends.get(row["stage"], ["", ""]),
        ]
        for row in summary["accuracy"]
    ]


def cost_lines(summary: Mapping[str, Any], recipe: Recipe, spent: BudgetTracker) -> dict[str, str]:
    """What a run cost: operations by phase, bytes to other processes, money where the recipe has prices, the budget that ended it.

    `spent` knows the seconds of the steps and the bytes; `summary` does not, because it holds nothing that depends on the clock.
    """
    cost = summary["cost"]
    shares = ", ".join(
        f"{phase} {cost[phase]['flops'] / max(cost['flops'], 1.0):.0%}" for phase in PHASES
    )
    known = f"{cost['flops']:.3g} floating-point operations ({shares})"
    lines = {
        "cost": known if cost["flops"] else "operations of models at a service are not counted"
    }
    if spent.wire_bytes:
        lines["wire"] = f"{shown_bytes(spent.wire_bytes)} to and from other processes"
    money = {} if recipe.prices is None else recipe.prices.money(cost, spent.spent["seconds"])
    if recipe.prices is not None and money:
        items = ", ".join(f"{name} {amount:.4g}" for name, amount in money.items())
        lines["money"] = (
            f"{sum(money.values()):.4g} {make_printable(recipe.prices.currency)} ({items})"
        )
    if summary["ended"] != ALL_DONE:
        lines["ended"] = (
            f"{summary['ended']}, after step {summary['steps']} of {recipe.train.steps}"
        )
    return lines


def shown_bytes(value: float | int) -> str:
    """A number of bytes for people, for example `4.1 MiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return (
                f"{value / size:.3g} {unit}"
                if value < 1000 * size
                else f"{value / size:.0f} {unit}"
            )
    return f"{value:.0f} B"


def _short(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


def format_sample(rollouts: Sequence[Rollout]) -> tuple[str, str]:
    """The first rollout's question and answer, safe to print."""
    return make_printable(rollouts[0].prompt.messages[-1].content), make_printable(rollouts[0].text)


def add_speed(metrics: Metrics) -> Metrics:
    """The metrics with the tokens a second of the whole step, for showing."""
    seconds = sum(value for name, value in metrics.items() if name.startswith("seconds_"))
    return metrics | {"tokens_per_second": metrics["tokens"] / max(seconds, 1e-9)}
