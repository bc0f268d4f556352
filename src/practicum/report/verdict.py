"""The first section of the page: the verdict, the gain, how much of the gap was closed, and the cost."""

from collections import defaultdict
from collections.abc import Sequence

from practicum.costs import PHASES, format_flops, summarize_costs
from practicum.recipe import Prices
from practicum.report.charts import render_interval_rows
from practicum.report.markup import (
    escape_text,
    format_count,
    format_duration,
    format_number,
    format_percent,
)
from practicum.report.outcome_verdict import RUN, read_gain, read_measure
from practicum.report.run_data import Row, RunData, is_divergence_estimated
from practicum.report.tables import ALL_DONE, describe_lost_rows
from practicum.statistics import (
    FEWEST_PROMPTS,
    Interval,
    contains_zero,
    difference,
    group_pairs,
    has_width,
    minimum_detectable_difference,
    ratio,
)


def render_verdict(run: RunData) -> str:
    """Render the gain with its interval, the accuracies on one scale, and the figures."""
    return (
        '<section id="verdict" class="verdict" aria-label="verdict">'
        f"{_render_word(run)}"
        f'<div class="headline">{_render_headline(run)}</div>'
        f'{_render_accuracies(run)}<dl class="figures">{_render_figures(run)}</dl></section>'
    )


def group_rewards(evaluation: Row | None) -> dict[str, list[float]]:
    """Return the rewards of each prompt's graded completions; empty without an evaluation."""
    answers = (evaluation or {}).get("answers", ())
    return group_pairs(
        (answer["prompt"], answer["reward"]) for answer in answers if answer["reward"] is not None
    )


def compute_scores(evaluation: Row | None) -> dict[str, float]:
    """Return each prompt's mean reward; empty without an evaluation or rewards."""
    rewards = group_rewards(evaluation)
    return {prompt: sum(values) / len(values) for prompt, values in rewards.items()}


def estimate_recovery(run: RunData) -> Interval | None:
    """Estimate (after - before) / (teacher - before) over the prompts that all three answered.

    None if the teacher's lead before training is not distinguishable from 0, because the ratio would
    then divide by noise.
    """
    before, after = compute_scores(run.before), compute_scores(run.after)
    teacher = compute_scores(run.teacher)
    prompts = [prompt for prompt in before if prompt in after and prompt in teacher]
    start = [before[prompt] for prompt in prompts]
    target = [teacher[prompt] for prompt in prompts]
    if not prompts or contains_zero(difference(target, start, run.seed)):
        return None
    gains = [after[prompt] - before[prompt] for prompt in prompts]
    leads = [teacher[prompt] - before[prompt] for prompt in prompts]
    return ratio(gains, leads, run.seed)


TONES = {
    "COLLAPSED": ("bad", "✖"),
    "WORSE": ("bad", "▼"),
    "NO DETECTABLE CHANGE": ("", "="),
    "TOO FEW PROMPTS": ("", "?"),
    "BETTER": ("good", "▲"),
}
"""The tone and the sign of each verdict, so that colour is not the only cue."""


def _render_word(run: RunData) -> str:
    """Render the stored verdict with its reasons and the next fixes to try; nothing while
    running."""
    if run.summary is None:
        return ""
    verdict = run.summary["verdict"]
    tone, sign = TONES[verdict["verdict"]]
    reasons = "".join(f"<li>{escape_text(reason)}</li>" for reason in verdict["reasons"])
    commands = ", ".join(f"<code>{escape_text(command)}</code>" for command in verdict["next"])
    advice = (
        f'<p class="what">try next, with {RUN} for this folder: {commands}</p>' if commands else ""
    )
    return (
        f'<div class="outcome {tone}"><p class="word"><span aria-hidden="true">{sign}</span> '
        f"{verdict['verdict']}</p><ul>{reasons}</ul>{advice}</div>"
    )


def _render_headline(run: RunData) -> str:
    if run.summary is None:
        return (
            f'<p class="gain">{run.last_step}<small> of {run.num_steps} steps</small></p>'
            f'<p class="what">{_describe_progress(run)}; '
            "the gain is measured when the run ends</p>"
        )
    name, numbers = read_gain(run.summary)
    if numbers is None:
        return (
            f'<p class="gain">{run.summary["steps"]}<small> steps</small></p>'
            '<p class="what">no held-out accuracy was measured</p>'
        )
    gain = Interval(**numbers)
    prompts = run.summary["before"]["prompts"]
    if prompts < FEWEST_PROMPTS:
        return (
            f'<p class="gain">{format_signed(gain.mean)}</p>'
            f'<p class="what">{name} on {prompts} held-out prompts, '
            "which are too few for an interval</p>"
        )
    interval = (
        f"95 % interval {format_signed(gain.low)} to {format_signed(gain.high)}, paired by prompt"
        if has_width(gain.low, gain.high)
        else "all prompts agree; no interval"
    )
    return (
        f'<p class="gain">{format_signed(gain.mean)}</p>'
        f'<p class="what">{name} on held-out prompts, {interval}</p>'
    )


def format_signed(difference: float) -> str:
    """Format a difference with its sign and two digits, or three if two would hide it."""
    text = f"{difference:+.2f}"
    return f"{difference:+.3f}" if difference and float(text) == 0 else text


def _describe_progress(run: RunData) -> str:
    if not run.metrics:
        return "the run has not finished a step yet"
    values = [row["reverse_kl"] for row in run.metrics if row.get("reverse_kl") is not None]
    if not values:
        return "the run continues"
    name = "reverse KL (estimate)" if is_divergence_estimated(run) else "reverse KL"
    return f"{name} from {values[0]:.3f} to {values[-1]:.3f} nats per token while training"


def _render_accuracies(run: RunData) -> str:
    after = run.after
    if after is None and run.summary is not None:
        after = run.summary["after"]
    columns = [
        ("before", run.before, "before"),
        ("after", after, "student"),
        ("teacher", run.teacher, "teacher"),
    ]
    accuracies = [
        (name, role, Interval(*(column["accuracy"][end] for end in ("mean", "low", "high"))))
        for name, column, role in columns
        if column is not None and column["accuracy"] is not None
    ]
    if not accuracies:
        return ""
    label = "held-out accuracy: " + ", ".join(
        f"{name} {accuracy.mean:.2f}" for name, _, accuracy in accuracies
    )
    caption = "<figcaption>held-out accuracy, 95 % intervals</figcaption>"
    rows = render_interval_rows(label, accuracies)
    return f'<figure class="accuracies">{rows}{caption}</figure>'


def _render_figures(run: RunData) -> str:
    return "".join(
        [
            _render_end(run),
            _render_lost_rows(run),
            _render_recovery(run),
            _render_distance(run),
            _render_tokens(run),
            _render_operations(run),
            _render_money(run),
            _render_time(run),
            _render_certainty(run),
        ]
    )


def _render_figure(name: str, value: str, about: str) -> str:
    return f"<div><dt>{name}</dt><dd><b>{value}</b><span>{about}</span></dd></div>"


def _render_end(run: RunData) -> str:
    """Render the step that ended the run before all steps were done."""
    if run.summary is None or run.summary.get("ended", ALL_DONE) == ALL_DONE:
        return ""
    step = f"step {run.summary['steps']} of {run.num_steps}"
    return _render_figure("ended at", step, escape_text(run.summary["ended"]))


def _render_lost_rows(run: RunData) -> str:
    """Render the number of rows that the disk did not take."""
    lost_rows = {} if run.summary is None else run.summary.get("lost_rows", {})
    if not lost_rows:
        return ""
    about = escape_text(describe_lost_rows(lost_rows))
    return _render_figure("rows lost", str(sum(lost_rows.values())), about)


def _render_recovery(run: RunData) -> str:
    if run.summary is None or run.teacher is None:
        return ""
    recovery = estimate_recovery(run)
    if recovery is None:
        about = "the teacher had no measurable lead before training"
        return _render_figure("gap recovered", "unknown", about)
    # A rounded integer has no sign at zero, which "-0 %" would have.
    mean, low, high = (
        f"{round(100 * share)} %" for share in (recovery.mean, recovery.low, recovery.high)
    )
    about = f"95 % interval {low} to {high}"
    if not has_width(recovery.low, recovery.high):
        about = "all prompts agree; no interval"
    return _render_figure("gap recovered", mean, about)


def _render_distance(run: RunData) -> str:
    before, after = run.before, run.after or (run.summary or {}).get("after")
    old = None if before is None else read_measure(before, "reverse_kl")
    new = None if after is None else read_measure(after, "reverse_kl")
    if old is None:
        return ""
    if new is None:
        value, about = format_number(old.mean), "nats per token, before training"
    else:
        value = f"{old.mean:.3g} → {new.mean:.3g}"
        about = "nats per token, on its own held-out answers"
    return _render_figure("reverse KL" if old.se == 0.0 else "reverse KL (estimate)", value, about)


def count_tokens(metrics: Sequence[Row]) -> tuple[float, float]:
    """Count the tokens of completions sampled from student or teacher, and of all completions."""
    totals = [row["rollouts"] * row["length"] for row in metrics]
    # Completions from the dataset were scored but not sampled.
    sampled = [
        total * (1.0 - (row.get("from_dataset") or 0.0))
        for total, row in zip(totals, metrics, strict=True)
    ]
    return sum(sampled, 0.0), sum(totals, 0.0)


def _render_tokens(run: RunData) -> str:
    if not run.metrics:
        return ""
    sampled, scored = count_tokens(run.metrics)
    supervised = format_count(sum(row["tokens"] for row in run.metrics))
    is_scored = any(row.get("reverse_kl") is not None for row in run.metrics)
    scored_count = format_count(scored) if is_scored else "none"
    about = f"sampled; {scored_count} scored, {supervised} supervised"
    return _render_figure("tokens", format_count(sampled), about)


def _render_operations(run: RunData) -> str:
    """Render the floating-point operations of the steps so far, and the share of each phase."""
    cost = summarize_costs(run.metrics)
    if not cost["flops"]:
        return ""
    shares = ", ".join(
        f"{phase} {format_percent(cost[phase]['flops'] / cost['flops'])}" for phase in PHASES
    )
    return _render_figure("operations", format_flops(cost["flops"]), shares)


def _render_money(run: RunData) -> str:
    """Render the cost of the steps so far at the recipe's prices, if it has any."""
    if run.recipe.get("prices") is None:
        return ""
    names = Prices.model_fields.keys() & run.recipe["prices"].keys()
    prices = Prices.model_validate({name: run.recipe["prices"][name] for name in names})
    items = prices.compute_money(summarize_costs(run.metrics), sum(_sum_phases(run).values()))
    about = ", ".join(f"{escape_text(name)} {amount:.3g}" for name, amount in items.items())
    total = f"{sum(items.values()):.3g} {escape_text(prices.currency)}"
    return _render_figure("cost", total, about)


def _sum_phases(run: RunData) -> dict[str, float]:
    """Return the seconds of each phase, summed over the steps."""
    phases = defaultdict[str, float](float)
    for row in run.timings:
        for name, seconds in row.items():
            if name.startswith("seconds_"):
                phases[name.removeprefix("seconds_")] += seconds
    return phases


def _render_time(run: RunData) -> str:
    phases = _sum_phases(run)
    total = sum(phases.values())
    if not total:
        return ""
    shares = ", ".join(
        f"{name} {format_percent(seconds / total)}" for name, seconds in phases.items()
    )
    return _render_figure("training time", format_duration(total), shares)


def _render_certainty(run: RunData) -> str:
    before, after = compute_scores(run.before), compute_scores(run.after)
    # A single run has one seed: the figure shows the smallest gain that its prompts can detect.
    least = minimum_detectable_difference(
        [after[prompt] - before[prompt] for prompt in before if prompt in after]
    )
    about = "intervals are about the prompts, not about other seeds"
    if least and not (run.summary or {}).get("draft_gain"):
        prompts = len(before)
        about = f"smallest gain that {prompts} such prompts can detect (80 % power): {least:.2f}"
    return _render_figure("certainty", "single seed", about)
