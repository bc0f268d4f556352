"""The page of a comparison: one self-contained HTML file with verdict, arms, curves and runs."""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from practicum.report import STYLE, escape_text, render_document
from practicum.report.markup import render_report_link, render_table
from practicum.run_dir import write_text
from practicum.statistics import group_pairs, has_width
from practicum.studies.compare.outcomes import METRICS
from practicum.studies.compare.tables import (
    Table,
    build_arm_table,
    build_pair_table,
    format_bounds,
)

COLOURS = ("#2f6fde", "#d9480f", "#2b8a3e", "#9c36b5", "#c2255c", "#0b7285", "#a67c00", "#5c677d")
"""The colours of the arms, in their order; more arms begin again."""

UNITS = {"flops": "FLOPs", "tokens": "tokens learned from", "seconds": "seconds", "steps": "steps"}
"""The units of spending against which curves are plotted, with their names."""

WIDTH, HEIGHT, LEFT, BELOW = 420, 240, 46, 34
"""The size of a chart of curves, and the margins for its axes, in pixels."""

ROW, NAMES, WIDE = 30, 170, 760
"""A chart of intervals in pixels: height of a row, width of its name, width of the chart."""

Interval = Mapping[str, float]
Row = tuple[str, str, float, Interval | None, Sequence[float]]
"""A row of a chart of intervals: name, colour, mean, interval, and dots."""

PAGE_STYLE = """
.verdict { font-size: 1.25rem; margin: 1.2rem 0 .4rem; }
.more { margin: 0 0 1.2rem; padding-left: 1.1rem; color: var(--soft); }
.legend span { display: inline-block; margin-right: 1.1rem; } .legend p { margin: .2rem 0; }
.dot { display: inline-block; width: .7rem; height: .7rem;
  margin-right: .35rem; }
.one { fill: none; stroke-width: 1; opacity: .4; } .bar { stroke-width: 3; }
.mean { fill: none; stroke-width: 2.5; } .grid { stroke: var(--line); stroke-dasharray: 2 4; }
.name { fill: var(--ink); }
.charts { grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); }
figure { margin: 0 0 1.2rem; }
figcaption { font-size: .9rem; }
"""


def write_page(path: Path, content: Mapping[str, Any]) -> None:
    """Write the page from the content of compare.json."""
    names = [arm["arm"] for arm in content["arms"]]
    colours = dict(zip(names, cycle(COLOURS), strict=False))
    seeds, budget = len(content["design"]["seeds"]), content["design"]["budget"]
    about = f"{seeds} seed{'' if seeds == 1 else 's'}, budget: {budget}"
    first, *further_lines = content["verdict"]
    title = "Comparison of " + ", ".join(names)
    legend = "".join(
        f"<span>{_render_dot(colour)}{escape_text(name)}</span>" for name, colour in colours.items()
    )
    body = (
        f'<h1>{escape_text(title)}</h1><p class="about">{escape_text(about)}</p>'
        f'<p class="verdict">{escape_text(first)}</p>'
        f'<ul class="more">{"".join(f"<li>{escape_text(line)}</li>" for line in further_lines)}</ul>'
        f"<h2>Arms</h2>{_render_methods(content, colours)}"
        f"{_render_arm_chart(content, colours)}{_render_table(build_arm_table(content))}"
        f"<h2>Held-out accuracy against what was spent</h2>"
        f'<p class="legend">{legend}</p>'
        f'<div class="charts">{_render_curve_charts(content, colours)}</div>'
        f"{_render_pairs(content)}<h2>Runs</h2>{_render_runs(content)}"
    )
    write_text(path, render_document(escape_text(title), STYLE + PAGE_STYLE, body))


def _render_table(table: Table) -> str:
    """Render a table with text in its first column and numbers in all further columns."""
    columns, rows = table
    body = [[escape_text(text) for text in row] for row in rows]
    return render_table(list(map(escape_text, columns)), body, numbers=range(1, len(columns)))


def _render_methods(content: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    """Render the description of each arm's method."""
    rows = "".join(
        f"<p>{_render_dot(colours[arm['arm']])}<b>{escape_text(arm['arm'])}</b>: "
        f"{escape_text(arm['method'])}</p>"
        for arm in content["arms"]
    )
    return f'<div class="legend">{rows}</div>'


def _render_arm_chart(content: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    """Render each arm's mean with its interval over seeds, and a dot for every seed."""
    metric = content["metric"]
    dots = group_pairs((outcome["arm"], outcome[metric]) for outcome in content["outcomes"])
    rows = [
        (arm["arm"], colours[arm["arm"]], arm["mean"], arm["interval"], dots[arm["arm"]])
        for arm in content["arms"]
        if arm["mean"] is not None
    ]
    caption = (
        f"{metric.replace('_', ' ')}: mean and 95 % interval over seeds (Student's t), a dot a seed"
    )
    return _render_interval_chart(rows, caption, (0.0, 1.0) if metric == "accuracy" else None)


def _render_pairs(content: Mapping[str, Any]) -> str:
    """Render the differences as a chart and as a table; nothing without pairs."""
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
    caption = "differences with their 95 % interval over seeds; a resolved one is coloured"
    chart = _render_interval_chart(rows, caption, None)
    return f"<h2>Differences</h2>{chart}{_render_table(build_pair_table(content))}"


def _render_interval_chart(
    rows: Sequence[Row], caption: str, limits: tuple[float, float] | None
) -> str:
    """Render one row for each mean; intervals are cut at the `limits` of the quantity.

    Without limits the axis holds 0.
    """
    if not rows:
        return ""
    numbers = [number for _, _, mean, _, dots in rows for number in (mean, *dots)]
    bounds = [(row[3]["low"], row[3]["high"]) for row in rows if row[3]]
    numbers += chain.from_iterable(bounds)
    low, high = min(numbers), max(numbers)
    if limits is None:
        low, high = min(low, 0.0), max(high, 0.0)
    else:
        low, high = max(low, limits[0]), min(high, limits[1])
    ticks = _choose_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    bottom = len(rows) * ROW + 8

    def place(number: float) -> str:
        inside = min(max(number, low), high)
        x = NAMES + (inside - low) / ((high - low) or 1.0) * (WIDE - NAMES - 20)
        return f"{x:.1f}"

    grid = "".join(
        f'<line class="grid" x1="{place(tick)}" y1="0" x2="{place(tick)}" y2="{bottom}"/>'
        f'<text x="{place(tick)}" y="{bottom + 16}" text-anchor="middle">{tick:.3g}</text>'
        for tick in ticks
    )
    bars = "".join(_render_interval_row(index, row, place) for index, row in enumerate(rows))
    label = html.escape(caption)
    return (
        f'<figure><svg viewBox="0 0 {WIDE} {bottom + 22}" role="img" aria-label="{label}">'
        f"{grid}{bars}</svg><figcaption>{label}</figcaption></figure>"
    )


def _render_interval_row(index: int, row: Row, place: Callable[[float], str]) -> str:
    """Render a row of a chart of intervals; `place` gives the x of a number."""
    name, colour, mean, interval, dots = row
    y = index * ROW + ROW / 2
    text, bar = f"{name}: {mean:.3f}", ""
    if interval and has_width(interval["low"], interval["high"]):
        low, high = interval["low"], interval["high"]
        text += f" {format_bounds(interval)}"
        bar = (
            f'<line class="bar" stroke="{colour}" stroke-linecap="round" x1="{place(low)}" '
            f'x2="{place(high)}" y1="{y}" y2="{y}"/>'
        )
    seeds = "".join(
        f'<circle cx="{place(dot)}" cy="{y + 8}" r="3" fill="{colour}" opacity=".55">'
        f"<title>{dot:.3f}</title></circle>"
        for dot in dots
    )
    label = name if len(name) <= 26 else name[:25] + "…"
    return (
        f'<g><title>{escape_text(text)}</title><text class="name" x="{NAMES - 10}" y="{y + 4}" '
        f'text-anchor="end">{escape_text(label)}</text>{bar}{seeds}'
        f'<circle cx="{place(mean)}" cy="{y}" r="5" fill="{colour}"/></g>'
    )


def _choose_ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that span a range."""
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def _render_curve_charts(content: Mapping[str, Any], colours: Mapping[str, str]) -> str:
    """Render one chart for each unit of spending in the runs."""
    units = {unit for outcome in content["outcomes"] for unit in outcome["spent"]}
    return "".join(_render_curve_chart(content, colours, unit) for unit in UNITS if unit in units)


def _render_curve_chart(content: Mapping[str, Any], colours: Mapping[str, str], unit: str) -> str:
    """Render a thin curve for each run, and a thick one for the mean over an arm's seeds."""
    arms = [outcome["arm"] for outcome in content["outcomes"]]
    curves = [
        [(point["spent"].get(unit, 0.0), point["accuracy"]) for point in outcome["curve"]]
        for outcome in content["outcomes"]
    ]
    points = list(chain.from_iterable(curves))
    if not points:
        return ""
    right = max(x for x, _ in points)
    xticks = _choose_ticks(0.0, right)
    yticks = _choose_ticks(min(y for _, y in points), max(y for _, y in points))
    low, high = yticks[0], yticks[-1]

    def place(x: float, y: float) -> tuple[str, str]:
        across = LEFT + x / (right or 1.0) * (WIDTH - LEFT - 24)
        down = 10 + (high - y) / ((high - low) or 1.0) * (HEIGHT - BELOW - 10)
        return f"{across:.1f}", f"{down:.1f}"

    def render_line(curve: Sequence[tuple[float, float]], style: str, name: str) -> str:
        path = " ".join(",".join(place(*point)) for point in curve)
        return (
            f'<polyline class="{style}" stroke="{colours[name]}" points="{path}">'
            f"<title>{escape_text(name)}</title></polyline>"
        )

    thin = "".join(render_line(curve, "one", arm) for arm, curve in zip(arms, curves, strict=True))
    by_arm = group_pairs(zip(arms, curves, strict=True))
    means = {name: build_mean_curve(by_arm.get(name, ())) for name in colours}
    thick = "".join(render_line(curve, "mean", name) for name, curve in means.items())
    axes = _render_axes(xticks, yticks, right, place)
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="held-out accuracy against {UNITS[unit]}">'
        f"{axes}{thin}{thick}</svg>"
        f"<figcaption>held-out accuracy against {UNITS[unit]}</figcaption></figure>"
    )


def _render_axes(
    xticks: Sequence[float],
    yticks: Sequence[float],
    right: float,
    place: Callable[[float, float], tuple[str, str]],
) -> str:
    """Render faint lines at the ticks of y, the numbers of both axes, and the title of y."""
    middle = (HEIGHT - BELOW) / 2
    title = f'transform="rotate(-90)" x="{-middle:g}" y="10" text-anchor="middle"'
    parts = [f"<text {title}>accuracy</text>"]
    for tick in yticks:
        (x1, y), (x2, _) = place(0.0, tick), place(right, tick)
        parts.append(f'<line class="grid" x1="{x1}" y1="{y}" x2="{x2}" y2="{y}"/>')
        below = f"{float(y) + 4:.1f}"
        parts.append(f'<text x="{LEFT - 8}" y="{below}" text-anchor="end">{tick:.3g}</text>')
    for tick in xticks:
        if tick <= right:
            x, label = place(tick, yticks[0])[0], _format_tick(tick)
            parts.append(f'<text x="{x}" y="{HEIGHT - 10}" text-anchor="middle">{label}</text>')
    return "".join(parts)


def _format_tick(number: float) -> str:
    """Format the number of a tick: `0`, `250`, `20k`, `1.5M`, `2e+12`."""
    size = abs(number)
    if size >= 1e9:
        return f"{number:.2g}"
    if size >= 1e6:
        return f"{number / 1e6:g}M"
    return f"{number / 1e3:g}k" if size >= 1e4 else f"{number:g}"


def build_mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return the mean over runs of their first, second ... point, as far as all runs have one."""
    return [
        (sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points))
        for points in zip(*curves, strict=False)
    ]


def _render_dot(colour: str) -> str:
    """Render a dot of a colour; the page's policy forbids style attributes."""
    return f'<svg class="dot" viewBox="0 0 8 8"><circle cx="4" cy="4" r="4" fill="{colour}"/></svg>'


def _render_runs(content: Mapping[str, Any]) -> str:
    """Render every run with a link to its report, and the reasons of failed runs."""
    rows = ""
    for outcome in content["outcomes"]:
        metric = next(outcome[key] for key in METRICS if outcome[key] is not None)
        report = render_report_link(outcome["folder"], "report")
        rows += (
            f"<tr><td>{escape_text(outcome['arm'])}</td><td>{outcome['seed']}</td>"
            f"<td>{outcome['verdict']}</td><td>{metric:.3f}</td><td>{report}</td></tr>"
        )
    for failure in content["failures"]:
        rows += (
            f"<tr><td>{escape_text(failure['arm'])}</td><td>{failure['seed']}</td>"
            f'<td class="wrong" colspan="3">{escape_text(failure["reason"])}</td></tr>'
        )
    columns = ["arm", "seed", "verdict", content["metric"], ""]
    head = f"<tr>{''.join(f'<th>{escape_text(name)}</th>' for name in columns)}</tr>"
    return f'<div class="scroll"><table>{head}{rows}</table></div>'
