"""The first thing on the page: what was gained, how much of the gap was closed, and what it cost."""

from collections.abc import Mapping, Sequence

from practicum.costs import PHASES, cost_summary
from practicum.recipe import Prices
from practicum.report.charts import interval_rows
from practicum.report.curves import recent
from practicum.report.markup import count, number, percent, safe, seconds
from practicum.report.reading import Row, RunData
from practicum.report.tables import ALL_DONE
from practicum.statistics import (
    Interval,
    contains_zero,
    difference,
    group_pairs,
    minimum_detectable_difference,
    ratio,
)


def verdict(run: RunData) -> str:
    """The gain with its interval, the three accuracies on one scale, and the figures that go with them."""
    return (
        f'<section id="verdict" class="verdict" aria-label="verdict"><div class="headline">{_headline(run)}</div>'
        f'{_accuracies(run)}<dl class="figures">{"".join(_figures(run))}</dl></section>'
    )


def scores(evaluation: Row | None) -> dict[str, float]:
    """Each prompt's mean reward; empty where there is no evaluation or no reward."""
    answers = (evaluation or {}).get("answers", ())
    rewards = group_pairs(
        (answer["prompt"], answer["reward"]) for answer in answers if answer["reward"] is not None
    )
    return {prompt: sum(values) / len(values) for prompt, values in rewards.items()}


def recovery(run: RunData) -> Interval | None:
    """(after - before) / (teacher - before) over the prompts that all three answered; None where that means nothing."""
    before, after, teacher = scores(run.before), scores(run.after), scores(run.teacher)
    prompts = [prompt for prompt in before if prompt in after and prompt in teacher]
    if not prompts or contains_zero(_gap(prompts, teacher, before, run.seed)):
        return None
    gained = [after[prompt] - before[prompt] for prompt in prompts]
    return ratio(gained, [teacher[prompt] - before[prompt] for prompt in prompts], run.seed)


def _gap(
    prompts: Sequence[str], one: Mapping[str, float], other: Mapping[str, float], seed: int
) -> Interval:
    return difference(
        [one[prompt] for prompt in prompts], [other[prompt] for prompt in prompts], seed
    )


def _headline(run: RunData) -> str:
    won = None if run.summary is None else run.summary["gain"]
    if won is not None:
        interval = Interval(**won)
        return (
            f'<p class="gain {_tone(interval)}">{signed(interval.mean)}</p><p class="what">accuracy on held-out prompts, '
            f"95 % interval {signed(interval.low)} to {signed(interval.high)}, paired by prompt: {_meaning(interval)}</p>"
        )
    if run.summary is None:
        done = int(run.metrics[-1]["step"]) if run.metrics else 0
        return (
            f'<p class="gain">{done}<small> of {run.steps} steps</small></p><p class="what">{_so_far(run)}; '
            "the gain is measured when the run ends</p>"
        )
    return f'<p class="gain">{run.summary["steps"]}<small> steps</small></p><p class="what">no held-out accuracy was measured</p>'


def signed(value: float) -> str:
    """A difference with its sign and two digits, or three where two would hide it."""
    text = f"{value:+.2f}"
    return f"{value:+.3f}" if value and float(text) == 0 else text


def _so_far(run: RunData) -> str:
    first = next(
        (row["reverse_kl"] for row in run.metrics if row.get("reverse_kl") is not None), None
    )
    last = recent(run.metrics, "reverse_kl")
    if first is None or last is None:
        return "the run has not finished a step yet" if not run.metrics else "the run goes on"
    return f"reverse KL from {first:.3f} to {last:.3f} nats a token while training"


def _tone(won: Interval) -> str:
    return "" if contains_zero(won) else "good" if won.mean > 0 else "bad"


def _meaning(won: Interval) -> str:
    if contains_zero(won):
        return "not told apart from no change"
    return "the student is better" if won.mean > 0 else "the student is worse"


def _accuracies(run: RunData) -> str:
    columns = [
        ("before", run.before, "before"),
        ("after", run.after, "student"),
        ("teacher", run.teacher, "teacher"),
    ]
    if run.after is None and run.summary is not None:
        columns[1] = ("after", run.summary["after"], "student")
    values = [
        (name, role, Interval(*(column["accuracy"][end] for end in ("mean", "low", "high"))))
        for name, column, role in columns
        if column is not None and column["accuracy"] is not None
    ]
    if not values:
        return ""
    label = "held-out accuracy: " + ", ".join(
        f"{name} {accuracy.mean:.2f}" for name, _, accuracy in values
    )
    caption = "<figcaption>held-out accuracy, 95 % intervals</figcaption>"
    return f'<figure class="accuracies">{interval_rows(label, values)}{caption}</figure>'


def _figures(run: RunData) -> list[str]:
    found = (
        figure(run)
        for figure in (_ended, _recovered, _distance, _cost, _work, _money, _time, _certainty)
    )
    return [figure for figure in found if figure]


def _figure(name: str, value: str, about: str) -> str:
    return f"<div><dt>{name}</dt><dd><b>{value}</b><span>{about}</span></dd></div>"


def _ended(run: RunData) -> str:
    """Where the run ended before all steps were done."""
    if run.summary is None or run.summary.get("ended", ALL_DONE) == ALL_DONE:
        return ""
    return _figure(
        "ended at", f"step {run.summary['steps']} of {run.steps}", safe(run.summary["ended"])
    )


def _recovered(run: RunData) -> str:
    if run.summary is None or run.teacher is None:
        return ""
    found = recovery(run)
    if found is None:
        return _figure(
            "gap recovered",
            "unknown",
            "the teacher's lead before training is not told apart from none",
        )
    return _figure(
        "gap recovered",
        _format_percent(found.mean),
        f"95 % interval {_format_percent(found.low)} to {_format_percent(found.high)}",
    )


def _format_percent(share: float) -> str:
    """A share in whole percent, without a sign before nothing."""
    return f"{round(100 * share)} %"


def _distance(run: RunData) -> str:
    before, after = run.before, run.after or (run.summary or {}).get("after")
    if before is None or before["reverse_kl"] is None:
        return ""
    if after is None or after["reverse_kl"] is None:
        return _figure("reverse KL", number(before["reverse_kl"]), "nats a token, before training")
    return _figure(
        "reverse KL",
        f"{before['reverse_kl']:.3g} → {after['reverse_kl']:.3g}",
        "nats a token, on its own held-out answers",
    )


def tokens_sampled(metrics: Sequence[Row]) -> tuple[float, float]:
    """Tokens of the completions that student or teacher wrote, and of all completions."""
    whole = [row["rollouts"] * row["length"] for row in metrics]
    written = [1.0 - (row.get("from_dataset") or 0.0) for row in metrics]
    return sum((tokens * share for tokens, share in zip(whole, written, strict=True)), 0.0), sum(
        whole, 0.0
    )


def _cost(run: RunData) -> str:
    if not run.metrics:
        return ""
    sampled, scored = tokens_sampled(run.metrics)
    learned = sum(row["tokens"] for row in run.metrics)
    silent = all(row.get("reverse_kl") is None for row in run.metrics)
    about = f"sampled; {'none' if silent else count(scored)} scored, {count(learned)} learned from"
    return _figure("tokens", count(sampled), about)


def _work(run: RunData) -> str:
    """Floating-point operations of the steps so far, and which phase they went to."""
    cost = cost_summary(run.metrics)
    if not cost["flops"]:
        return ""
    shares = ", ".join(
        f"{phase} {percent(cost[phase]['flops'] / cost['flops'])}" for phase in PHASES
    )
    return _figure("operations", f"{cost['flops']:.3g}", shares)


def _money(run: RunData) -> str:
    """What the steps so far cost at the recipe's prices; nothing where it has none."""
    if run.recipe.get("prices") is None:
        return ""
    prices = Prices.model_validate(run.recipe["prices"])
    items = prices.money(cost_summary(run.metrics), sum(_phases(run).values()))
    about = ", ".join(f"{safe(name)} {amount:.3g}" for name, amount in items.items())
    return _figure("cost", f"{sum(items.values()):.3g} {safe(prices.currency)}", about)


def _phases(run: RunData) -> dict[str, float]:
    """Seconds of each phase, summed over the steps."""
    phases: dict[str, float] = {}
    for row in run.timings:
        for name, value in row.items():
            if name.startswith("seconds_"):
                phases[name.removeprefix("seconds_")] = (
                    phases.get(name.removeprefix("seconds_"), 0.0) + value
                )
    return phases


def _time(run: RunData) -> str:
    phases = _phases(run)
    total = sum(phases.values())
    if not total:
        return ""
    shares = ", ".join(f"{name} {percent(value / total)}" for name, value in phases.items())
    return _figure("training time", seconds(total), shares)


def _certainty(run: RunData) -> str:
    before, after = scores(run.before), scores(run.after)
    least = minimum_detectable_difference(
        [after[prompt] - before[prompt] for prompt in before if prompt in after]
    )
    if not least:
        return _figure(
            "certainty", "single seed", "intervals are about the prompts, not about other seeds"
        )
    return _figure(
        "certainty",
        "single seed",
        f"smallest gain that {len(before)} such prompts find four times in five: {least:.2f}",
    )
