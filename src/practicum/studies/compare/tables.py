"""The two tables of a comparison, as columns and rows of text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from practicum.costs import format_flops
from practicum.statistics import FEWEST_PROMPTS, has_width
from practicum.studies.compare.outcomes import format_p

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Columns and rows."""


def build_arm_table(content: Mapping[str, Any]) -> Table:
    """Return one row an arm, from compare.json: runs, verdicts, metric, divergence, spending."""
    units = list(dict.fromkeys(unit for arm in content["arms"] for unit in arm["spent"]))
    has_accuracy = content["metric"] == "accuracy"
    limits = (0.0, 1.0) if has_accuracy else None
    divergences = {
        key: label
        for key, label in (
            ("reverse_kl", "reverse KL"),
            ("reverse_kl_estimate", "reverse KL (estimate)"),
        )
        if has_accuracy and any(arm[key] is not None for arm in content["arms"])
    }
    metric = content["metric"].replace("_", " ")
    columns = ["arm", "runs", "verdicts", metric, "95 % over seeds", *divergences.values(), *units]
    rows = []
    for arm in content["arms"]:
        runs = f"{arm['finished']} of {arm['finished'] + arm['failed']}"
        interval = format_bounds(arm["interval"], limits)
        verdicts = _format_verdicts(arm["verdicts"])
        row = [arm["arm"], runs, verdicts, _format_metric(arm["mean"]), interval]
        row += [_format_metric(arm[key]) for key in divergences]
        rows.append([*row, *(_format_amount(unit, arm["spent"].get(unit)) for unit in units)])
    return columns, rows


def build_pair_table(content: Mapping[str, Any]) -> Table:
    """Return one row a pair: difference, intervals, p-value, and if it is resolved."""
    intervals = ["95 % over seeds", "95 % over prompts"]
    columns = ["pair", "difference", *intervals, "p (Holm)", "resolved", "needs about"]
    rows = [
        [
            f"{pair['one']} - {pair['other']}",
            f"{pair['mean']:+.3f}",
            format_bounds(pair["over_seeds"]),
            _format_over_prompts(pair),
            format_p(pair["p"]),
            "yes" if pair["resolved"] else "no",
            _describe_needs(pair),
        ]
        for pair in content["pairs"]
    ]
    return columns, rows


def format_bounds(
    interval: Mapping[str, float] | None, limits: tuple[float, float] | None = None
) -> str:
    """Format both ends of an interval, cut at the limits of the quantity; nothing for None.

    An interval without width contains no information about other seeds or prompts, so its ends are
    not shown.
    """
    if interval is None:
        return ""
    if not has_width(interval["low"], interval["high"]):
        return "all equal"
    low, high = limits or (-math.inf, math.inf)
    return f"[{max(interval['low'], low):.3f}, {min(interval['high'], high):.3f}]"


def _format_verdicts(verdicts: Mapping[str, int]) -> str:
    """Format the verdicts of an arm's runs, the most frequent first: `2 BETTER, 1 COLLAPSED`."""
    by_count = sorted(verdicts.items(), key=lambda entry: (-entry[1], entry[0]))
    return ", ".join(f"{count} {word}" for word, count in by_count)


def _format_over_prompts(pair: Mapping[str, Any]) -> str:
    """Format the interval over prompts, or state that there are too few prompts."""
    if pair["over_prompts"] is not None and pair["prompts"] < FEWEST_PROMPTS:
        return "too few"
    return format_bounds(pair["over_prompts"])


def _describe_needs(pair: Mapping[str, Any]) -> str:
    """Name the seeds and prompts that a difference of this size would need.

    Nothing if it is resolved.
    """
    if pair["resolved"]:
        return ""
    needed = {unit: pair[f"{unit}_needed"] or 0 for unit in ("seeds", "prompts")}
    return ", ".join(f"{needed[unit]} {unit}" for unit in needed if needed[unit] > pair[unit])


def _format_metric(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}"


def _format_amount(unit: str, amount: float | None) -> str:
    """Format an amount of a unit with three digits: `40`, `12300`, `18.3 GFLOP`."""
    if amount is None:
        return ""
    if unit == "flops":
        return format_flops(amount)
    return f"{amount:.0f}" if amount >= 10 else f"{amount:.3g}"
