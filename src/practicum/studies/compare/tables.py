"""The two tables of a comparison, as columns and rows of text."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from practicum.studies.compare.outcomes import shown_p

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Columns and rows."""


def arm_table(content: Mapping[str, Any]) -> Table:
    """One row an arm: how many runs, how good, how far from the teacher, and what it cost."""
    units = list(dict.fromkeys(unit for arm in content["arms"] for unit in arm["spent"]))
    metric = content["metric"].replace("_", " ")
    columns = [
        "arm",
        "runs",
        metric,
        "95 % over seeds",
        *(["reverse KL"] if metric == "accuracy" else []),
        *units,
    ]
    rows = []
    for arm in content["arms"]:
        runs = f"{arm['finished']} of {arm['finished'] + arm['failed']}"
        divergence = [_number(arm["reverse_kl"])] if metric == "accuracy" else []
        costs = [_amount(arm["spent"].get(unit)) for unit in units]
        interval = bounds(arm["interval"], within=(0.0, 1.0) if metric == "accuracy" else None)
        rows.append([arm["arm"], runs, _number(arm["mean"]), interval, *divergence, *costs])
    return columns, rows


def pair_table(content: Mapping[str, Any]) -> Table:
    """One row a pair: the difference, its interval over seeds and over prompts, and whether it is resolved."""
    columns = [
        "pair",
        "difference",
        "95 % over seeds",
        "95 % over prompts",
        "p (Holm)",
        "resolved",
        "needs about",
    ]
    rows = [
        [
            f"{pair['one']} - {pair['other']}",
            f"{pair['mean']:+.3f}",
            bounds(pair["over_seeds"]),
            bounds(pair["over_prompts"]),
            shown_p(pair["p"]),
            "yes" if pair["resolved"] else "no",
            _needs(pair),
        ]
        for pair in content["pairs"]
    ]
    return columns, rows


def bounds(interval: Mapping[str, float] | None, within: tuple[float, float] | None = None) -> str:
    """The two ends of an interval, cut where the quantity itself ends; nothing for None."""
    if interval is None:
        return ""
    low, high = within or (-math.inf, math.inf)
    return f"[{max(interval['low'], low):.3f}, {min(interval['high'], high):.3f}]"


def _needs(pair: Mapping[str, Any]) -> str:
    """Seeds and prompts that a difference like the one seen would need."""
    if pair["resolved"]:
        return ""
    wanted = (
        (pair["seeds_needed"], pair["seeds"], "seeds"),
        (pair["prompts_needed"], pair["prompts"], "prompts"),
    )
    return ", ".join(
        f"{needed} {what}"
        for needed, there, what in wanted
        if needed is not None and needed > there
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _amount(value: float | None) -> str:
    """A cost in three digits: `40`, `12300`, `1.23e+09`."""
    return "" if value is None else f"{value:.0f}" if 10 <= value < 1e6 else f"{value:.3g}"
