"""The page of a comparison: one self-contained HTML file with the verdict, the arms, the curves and every run."""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from practicum.report import STYLE, document, safe
from practicum.run_dir import write_text
from practicum.studies.compare.tables import Table, arm_table, pair_table

COLOURS = ("#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#c2255c", "#0b7285", "#a67c00", "#5c677d")
"""Of the arms, in their order, and then from the beginning."""

UNITS = {"flops": "FLOPs", "tokens": "tokens learned from", "seconds": "seconds", "steps": "steps"}
"""What curves are drawn against, and its name."""

WIDTH, HEIGHT, LEFT, BELOW = 420, 240, 46, 34
"""Of a chart of curves, with the room for its axes."""

ROW, NAMES, WIDE = 30, 170, 760
"""Of a chart of intervals: the height of a row, the room for its name, and the whole width."""

PAGE_STYLE = """
.verdict { font-size: 1.25rem; margin: 1.2rem 0 .4rem; } .more { margin: 0 0 1.2rem; padding-left: 1.1rem; color: var(--soft); }
.legend span { display: inline-block; margin-right: 1.1rem; } .legend p { margin: .2rem 0; }
.legend i { display: inline-block; width: .7rem; height: .7rem;
  border-radius: .2rem; margin-right: .35rem; } .one { fill: none; stroke-width: 1; opacity: .4; } .bar { stroke-width: 3; }
.mean { fill: none; stroke-width: 2.5; } .grid { stroke: var(--line); stroke-dasharray: 2 4; } .name { fill: var(--ink); }
.charts { grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; } figure { margin: 0 0 1.2rem; }
figcaption { font-size: .9rem; }
"""


def write_page(path: Path, content: Mapping[str, Any]) -> None:
    """Write the page from the content of compare.json."""
    names = [arm["arm"] for arm in content["arms"]]
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    design = content["design"]
    first, *more = content["verdict"]
    title = "Comparison of " + ", ".join(names)
    about = f"{_count(len(design['seeds']), 'seed')}, budget: {design['budget']}"
    legend = "".join(
        f'<span><i style="background:{colours[name]}"></i>{safe(name)}</span>' for name in names
    )
    body = (
        f'<h1>{safe(title)}</h1><p class="about">{safe(about)}</p><p class="verdict">{safe(first)}</p>'
        f'<ul class="more">{"".join(f"<li>{safe(line)}</li>" for line in more)}</ul>'
        f"<h2>Arms</h2>{_methods(content, colours)}{_arms_chart(content, colours)}{_table(arm_table(content))}"
        f"<h2>Held-out accuracy against what was spent</h2>"
        f'<p class="legend">{legend}</p><div class="charts">{_curves(content, colours)}</div>'
        f"{_pairs(content)}<h2>Runs</h2>{_runs(content)}"
    )
    write_text(path, document(safe(title), STYLE + PAGE_STYLE, body))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(table: Table) -> str:
    columns, rows = table
    head = "".join(
        f"<th{'' if place == 0 else _NUMBER}>{safe(column)}</th>"
        for place, column in enumerate(columns)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{'' if place == 0 else _NUMBER}>{safe(cell)}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


_NUMBER = ' class="number"'


def _methods(content: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    """What each arm is, in the field's words."""
    rows = "".join(
        f'<p><i style="background:{colours[arm["arm"]]}"></i><b>{safe(arm["arm"])}</b>: {safe(arm["method"])}</p>'
        for arm in content["arms"]
    )
    return f'<div class="legend">{rows}</div>'


def _arms_chart(content: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    """Each arm's mean with its interval over seeds, and a dot for every seed."""
    metric = content["metric"]
    dots = {
        arm["arm"]: [
            outcome[metric] for outcome in content["outcomes"] if outcome["arm"] == arm["arm"]
        ]
        for arm in content["arms"]
    }
    rows = [
        (arm["arm"], colours[arm["arm"]], arm["mean"], arm["interval"], dots[arm["arm"]])
        for arm in content["arms"]
        if arm["mean"] is not None
    ]
    caption = (
        f"{metric.replace('_', ' ')}: mean and 95 % interval over seeds (Student's t), a dot a seed"
    )
    limits = (0.0, 1.0) if metric == "accuracy" else None
    return _interval_chart(rows, caption, limits)


def _pairs(content: Mapping[str, Any]) -> str:
    """The differences, drawn and as numbers."""
    if not content["pairs"]:
        return ""
    rows = [
        (
            f"{pair['one']} - {pair['other']}",
            "var(--accent)" if pair["resolved"] else "var(--soft)",
            pair["mean"],
            pair["over_seeds"] or pair["over_prompts"],
            [],
        )
        for pair in content["pairs"]
    ]
    chart = _interval_chart(
        rows, "differences with their 95 % interval over seeds; a resolved one is coloured", None
    )
    return f"<h2>Differences</h2>{chart}{_table(pair_table(content))}"


def _interval_chart(
    rows: Sequence[tuple[str, str, float, Mapping[str, float] | None, Sequence[float]]],
    caption: str,
    limits: tuple[float, float] | None,
) -> str:
    """One row for each (name, colour, mean, interval, dots); intervals are cut at the `limits` of the quantity."""
    if not rows:
        return ""
    every = [
        number
        for _, _, mean, interval, dots in rows
        for number in (mean, *dots, *((interval["low"], interval["high"]) if interval else ()))
    ]
    low, high = min(every), max(every)
    if limits is None:
        low, high = min(low, 0.0), max(high, 0.0)
    else:
        low, high = max(low, limits[0]), min(high, limits[1])
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    bottom = len(rows) * ROW + 8

    def place(value: float) -> float:
        inside = min(max(value, low), high)
        return NAMES + (inside - low) / ((high - low) or 1.0) * (WIDE - NAMES - 20)

    grid = "".join(
        f'<line class="grid" x1="{place(tick):.1f}" y1="0" x2="{place(tick):.1f}" y2="{bottom}"/>'
        f'<text x="{place(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:.3g}</text>'
        for tick in ticks
    )
    drawn = "".join(_interval_row(number, row, place) for number, row in enumerate(rows))
    return (
        f'<figure><svg viewBox="0 0 {WIDE} {bottom + 22}" role="img" aria-label="{html.escape(caption)}">{grid}{drawn}</svg>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _interval_row(
    number: int,
    row: tuple[str, str, float, Mapping[str, float] | None, Sequence[float]],
    place: Any,
) -> str:
    name, colour, mean, interval, dots = row
    middle = number * ROW + ROW / 2
    text = f"{name}: {mean:.3f}" + (
        f" [{interval['low']:.3f}, {interval['high']:.3f}]" if interval else ""
    )
    bar = (
        ""
        if interval is None
        else f'<line class="bar" stroke="{colour}" stroke-linecap="round" x1="{place(interval["low"]):.1f}" '
        f'x2="{place(interval["high"]):.1f}" y1="{middle}" y2="{middle}"/>'
    )
    seeds = "".join(
        f'<circle cx="{place(dot):.1f}" cy="{middle + 8}" r="3" fill="{colour}" opacity=".55"><title>{dot:.3f}</title></circle>'
        for dot in dots
    )
    return (
        f'<g><title>{safe(text)}</title><text class="name" x="{NAMES - 10}" y="{middle + 4}" text-anchor="end">'
        f'{safe(_short(name))}</text>{bar}{seeds}<circle cx="{place(mean):.1f}" cy="{middle}" r="5" fill="{colour}"/></g>'
    )


def _short(name: str) -> str:
    return name if len(name) <= 26 else name[:25] + "…"


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that span a range."""
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def _curves(content: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    """One chart for each unit that runs were charged in."""
    there = {unit for outcome in content["outcomes"] for unit in outcome["spent"]}
    return "".join(_curve_chart(content, colours, unit) for unit in UNITS if unit in there)


def _curve_chart(content: Mapping[str, Any], colours: Mapping[str, str], unit: str) -> str:
    """A thin line a run and a thick one for the mean over an arm's seeds."""
    lines = [
        (
            outcome["arm"],
            [(point["spent"].get(unit, 0.0), point["accuracy"]) for point in outcome["curve"]],
        )
        for outcome in content["outcomes"]
    ]
    everything = [point for _, points in lines for point in points]
    if not everything:
        return ""
    xticks = _ticks(0.0, max(x for x, _ in everything))
    yticks = _ticks(min(y for _, y in everything), max(y for _, y in everything))
    right, low, high = max(x for x, _ in everything), yticks[0], yticks[-1]

    def place(x: float, y: float) -> str:
        across = LEFT + x / (right or 1.0) * (WIDTH - LEFT - 24)
        down = 10 + (high - y) / ((high - low) or 1.0) * (HEIGHT - BELOW - 10)
        return f"{across:.1f},{down:.1f}"

    def line(points: Sequence[tuple[float, float]], colour: str, style: str, title: str) -> str:
        path = " ".join(place(*point) for point in points)
        return f'<polyline class="{style}" stroke="{colour}" points="{path}"><title>{safe(title)}</title></polyline>'

    thin = "".join(line(points, colours[arm], "one", arm) for arm, points in lines)
    thick = "".join(
        line(mean_curve([points for arm, points in lines if arm == name]), colour, "mean", name)
        for name, colour in colours.items()
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="held-out accuracy against {UNITS[unit]}">'
        f"{_axes(xticks, yticks, right, place)}{thin}{thick}</svg><figcaption>{UNITS[unit]}</figcaption></figure>"
    )


def _axes(xticks: Sequence[float], yticks: Sequence[float], right: float, place: Any) -> str:
    """Faint lines with their numbers."""
    parts = []
    for tick in yticks:
        (x1, y), x2 = place(0.0, tick).split(","), place(right, tick).split(",")[0]
        parts.append(f'<line class="grid" x1="{x1}" y1="{y}" x2="{x2}" y2="{y}"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{tick:.3g}</text>'
        )
    for tick in xticks:
        if tick <= right:
            x = place(tick, yticks[0]).split(",")[0]
            parts.append(
                f'<text x="{x}" y="{HEIGHT - 10}" text-anchor="middle">{_amount(tick)}</text>'
            )
    return "".join(parts)


def _amount(value: float) -> str:
    """`0`, `250`, `20k`, `1.5M`, `2e+12`."""
    for size, letter in ((1e9, ""), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return (
                f"{value:.2g}"
                if not letter
                else f"{value / (1e3 if letter == 'k' else size):g}{letter}"
            )
    return f"{value:g}"


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean over runs of their first, second ... point, as far as all have one."""
    return [
        (sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points))
        for points in zip(*curves, strict=False)
    ]


def _runs(content: Mapping[str, Any]) -> str:
    """Every run with its report, and the reasons of those that failed."""
    rows = "".join(
        f"<tr><td>{safe(outcome['arm'])}</td><td>{outcome['seed']}</td><td>{_accuracy(outcome)}</td>"
        f'<td><a href="{html.escape(outcome["folder"])}/report.html">report</a></td></tr>'
        for outcome in content["outcomes"]
    )
    rows += "".join(
        f"<tr><td>{safe(failure['arm'])}</td><td>{failure['seed']}</td>"
        f'<td class="wrong" colspan="2">{safe(failure["reason"])}</td></tr>'
        for failure in content["failures"]
    )
    head = f"<tr><th>arm</th><th>seed</th><th>{safe(content['metric'])}</th><th></th></tr>"
    return f'<div class="scroll"><table>{head}{rows}</table></div>'


def _accuracy(outcome: Mapping[str, Any]) -> str:
    value = outcome["accuracy"] if outcome["accuracy"] is not None else outcome["reverse_kl"]
    return f"{value:.3f}"
