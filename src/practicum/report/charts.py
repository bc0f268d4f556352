"""Charts as SVG: curves over steps, points with intervals, and a diagonal to be near."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from practicum.statistics import Interval, group_pairs

WIDTH, HEIGHT = 400.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 14.0, 24.0
"""The margins around the plot, in the units of the drawing."""

MOST_POINTS = 1200
"""A curve of more points is drawn by the lowest and the highest of each stretch."""

SMOOTHED = 80
"""From so many points on, a running mean is drawn over the curve."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart: what it is called, whose colour it has, and its points in order."""

    name: str
    role: str
    points: list[Point]


@dataclass(frozen=True, slots=True)
class EventMark:
    """A place on the time axis with what happened there, and to which reading; other charts show it small."""

    step: float
    text: str
    reading: str = ""


@dataclass(frozen=True, slots=True)
class Axis:
    """From values to places: `low` to `high` become `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float | int) -> float:
        """Where a value is drawn."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values within the axis: steps of 1, 2 or 5 times a power of ten."""
        step = _round_step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def values_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis that holds the values, from 0 where that is near, and ends at a round one."""
    low, high = min(values), max(values)
    if low >= 0:
        low = 0.0
    if high <= low:
        low, high = (1.5 * low, 0.0) if low < 0 else (0.0, 1.5 * high or 1.0)
    step = _round_step((high - low) / 4)
    return Axis(
        math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-3) * step, start, end
    )


def shown(value: float | int) -> str:
    """A tick's label, as short as it can be."""
    if value == 0 or abs(value) < 1e-12:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        text = f"{value:.6f}".rstrip("0").rstrip(".")
        return f"{value:,.0f}" if abs(value) >= 1000 else text
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def downsample(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    stretches = most // 2
    kept: list[Point] = []
    for place in range(stretches):
        part = points[place * len(points) // stretches : (place + 1) * len(points) // stretches]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def running_mean(points: Sequence[Point]) -> list[Point]:
    """The mean of a fortieth of the points around each."""
    reach = max(len(points) // 80, 1)
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    found = []
    for place, (step, _) in enumerate(points):
        low, high = max(place - reach, 0), min(place + reach + 1, len(points))
        found.append((step, (sums[high] - sums[low]) / (high - low)))
    return found


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps of a run with what happened at them."""

    last: float
    marks: Sequence[EventMark]


def line_chart(
    id: str, label: str, curves: Sequence[Curve], time: Timeline, readings: Sequence[str]
) -> str:
    """Curves over the steps, with a dashed line at each mark of its `readings`; the reader walks it with the arrow keys."""
    steps = [step for curve in curves for step, _ in curve.points]
    across = Axis(
        min(min(steps), 1.0), max(time.last, max(steps), min(steps) + 1), LEFT, WIDTH - RIGHT
    )
    up = values_axis([value for curve in curves for _, value in curve.points], HEIGHT - BOTTOM, TOP)
    lines = "".join(_curve(curve, across, up) for curve in curves)
    ends = f'data-chart="{id}" data-low="{across.low:g}" data-high="{across.high:g}"'
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" tabindex="0" {ends} aria-label="{html.escape(label)}">'
        f"{_grid(across, up)}{_marks(time.marks, across, readings)}{lines}"
        f'<g class="cursor" visibility="hidden"><line y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}"/></g></svg>'
    )


def _grid(across: Axis, up: Axis) -> str:
    rows = "".join(_row(up, tick) for tick in up.ticks(4))
    steps = sorted(
        {round(tick) for tick in across.ticks(5) if tick >= across.low} | {round(across.low)}
    )
    kept = [
        step
        for step in steps
        if step == round(across.low) or across.at(step) - across.at(across.low) > 34
    ]
    columns = "".join(_column(across, step, f"{step:,.0f}") for step in kept)
    ground = HEIGHT - BOTTOM
    return f'{rows}<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{ground:g}" y2="{ground:g}"/>{columns}'


def _row(up: Axis, tick: float) -> str:
    """Draw a faint line at a value of the vertical axis, with its number."""
    return (
        f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{up.at(tick):.1f}" y2="{up.at(tick):.1f}"/>'
        f'<text x="{LEFT - 6:g}" y="{up.at(tick) + 4:.1f}" text-anchor="end">{shown(tick)}</text>'
    )


def _column(across: Axis, place: float | int, label: str) -> str:
    """Write a label, which is HTML, below a place of the horizontal axis."""
    return (
        f'<text x="{across.at(place):.1f}" y="{HEIGHT - 7:g}" text-anchor="middle">{label}</text>'
    )


def _marks(marks: Sequence[EventMark], across: Axis, readings: Sequence[str]) -> str:
    """A flag at each place, with a dashed line where it is about one of the readings; those that fall together share one."""
    places = group_pairs((round(across.at(mark.step), 1), mark) for mark in marks)
    return "".join(
        _flag(x, found, any(mark.reading in readings for mark in found))
        for x, found in places.items()
    )


def _flag(x: float, marks: Sequence[EventMark], own: bool) -> str:
    title = "&#10;".join(html.escape(mark.text) for mark in marks)
    line = f'<line x1="{x}" x2="{x}" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}"/>' if own else ""
    shape = (
        f"M{x - 4:.1f} {TOP - 9:g} h8 l-4 8 z" if own else f"M{x - 2:.1f} {TOP - 6:g} h4 l-2 4 z"
    )
    return f'<g class="alarm{"" if own else " other"}"><title>{title}</title>{line}<path d="{shape}"/></g>'


def _curve(curve: Curve, across: Axis, up: Axis) -> str:
    def line(points: Sequence[Point], kind: str) -> str:
        places = " ".join(f"{across.at(step):.1f},{up.at(value):.1f}" for step, value in points)
        return f'<polyline class="curve {curve.role}{kind}" points="{places}"/>'

    points = downsample(curve.points)
    if len(points) == 1:
        step, value = points[0]
        return f'<circle class="dot {curve.role}" cx="{across.at(step):.1f}" cy="{up.at(value):.1f}" r="3.5"/>'
    if len(points) < SMOOTHED:
        return line(points, "")
    return line(points, " raw") + line(downsample(running_mean(curve.points), 400), "")


Ranged = tuple[int, Interval]
"""A place of the horizontal axis, and the mean with its interval there."""


def ranged_chart(
    label: str,
    groups: Sequence[tuple[str, str, Sequence[Ranged]]],
    names: Sequence[str],
    top: float | None = None,
) -> str:
    """Points with intervals, a colour a group, at the places 0, 1, 2 ... called `names`; `top` fixes the upper end."""
    highs = [interval.high for _, _, group in groups for _, interval in group]
    ends = [0.0, *highs] if top is None else [0.0, top]
    lows = [interval.low for _, _, group in groups for _, interval in group]
    up = values_axis([*ends, *(low for low in lows if low < 0)], HEIGHT - BOTTOM, TOP)
    across = Axis(-0.5, len(names) - 0.5, LEFT, WIDTH - RIGHT)
    shift = [8 * (place - (len(groups) - 1) / 2) for place in range(len(groups))]
    drawn = "".join(
        _ranged(name, role, group, across, up, offset)
        for (name, role, group), offset in zip(groups, shift, strict=True)
    )
    return f"{_opened(label)}{_frame(up, across, names)}{drawn}</svg>"


def _ranged(
    name: str, role: str, group: Sequence[Ranged], across: Axis, up: Axis, offset: float
) -> str:
    places = [(across.at(place) + offset, interval) for place, interval in group]
    line = " ".join(f"{x:.1f},{up.at(value.mean):.1f}" for x, value in places)
    whiskers = "".join(
        f'<g class="{role}"><title>{html.escape(name)}: {value:.3g}</title>'
        f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{up.at(value.low):.1f}" y2="{up.at(value.high):.1f}"/>'
        f'<circle class="dot" cx="{x:.1f}" cy="{up.at(value.mean):.1f}" r="3.5"/></g>'
        for x, value in places
    )
    return f'<polyline class="curve thin {role}" points="{line}"/>{whiskers}'


def bar_chart(
    label: str, groups: Sequence[tuple[str, str, Sequence[float]]], names: Sequence[str]
) -> str:
    """Bars of shares side by side, a colour a group, at places called `names`."""
    up = values_axis(
        [0.0, *(value for _, _, values in groups for value in values)], HEIGHT - BOTTOM, TOP
    )
    across = Axis(-0.5, len(names) - 0.5, LEFT, WIDTH - RIGHT)
    wide = 0.8 * (across.at(1) - across.at(0)) / len(groups)
    bars = "".join(
        f'<rect class="dot {role}" x="{across.at(place) + (number - len(groups) / 2) * wide:.1f}" y="{up.at(value):.1f}" '
        f'width="{max(wide - 1, 1):.1f}" height="{up.at(0) - up.at(value):.1f}" rx="1">'
        f"<title>{html.escape(name)}, {html.escape(names[place])}: {100 * value:.1f} %</title></rect>"
        for number, (name, role, values) in enumerate(groups)
        for place, value in enumerate(values)
        if value > 0
    )
    return f"{_opened(label)}{_frame(up, across, names)}{bars}</svg>"


def _frame(up: Axis, across: Axis, names: Sequence[str]) -> str:
    """The grid of the vertical axis, and the names along the horizontal one, as many as there is room for."""
    rows = "".join(_row(up, tick) for tick in up.ticks(4))
    room = max(map(len, names)) * 7 + 8
    stride = max(-(-len(names) * room // (WIDTH - LEFT - RIGHT)), 1)
    columns = "".join(
        _column(across, place, html.escape(name))
        for place, name in enumerate(names)
        if place % stride == 0
    )
    ground = f'<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{up.at(0.0):.1f}" y2="{up.at(0.0):.1f}"/>'
    return rows + ground + columns


def diagonal_chart(label: str, groups: Sequence[tuple[str, str, Sequence[Point]]]) -> str:
    """Points of [0, 1] x [0, 1] beside the diagonal on which they would lie if confidence were earned."""
    across = Axis(0.0, 1.0, LEFT, WIDTH - RIGHT)
    up = Axis(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    grid = "".join(
        _row(up, tick) + _column(across, tick, shown(tick)) for tick in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    drawn = "".join(
        f'<polyline class="curve {role}" points="{" ".join(f"{across.at(x):.1f},{up.at(y):.1f}" for x, y in points)}"/>'
        + "".join(
            f'<circle class="dot {role}" cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="3.5">'
            f"<title>{html.escape(name)}: confidence {x:.2f}, right {y:.2f}</title></circle>"
            for x, y in points
        )
        for name, role, points in groups
    )
    return (
        f"{_opened(label)}{grid}"
        f'<line class="ideal" x1="{LEFT:g}" y1="{HEIGHT - BOTTOM:g}" x2="{WIDTH - RIGHT:g}" y2="{TOP:g}"/>{drawn}</svg>'
    )


def interval_rows(label: str, values: Sequence[tuple[str, str, Interval]]) -> str:
    """One row each: a dot with its interval on the scale from 0 to 1, named at the left and read at the right."""
    height = 26.0 * len(values) + 24
    across = Axis(0.0, 1.0, 74.0, WIDTH - 62)
    ticks = "".join(
        f'<line class="grid" x1="{across.at(tick):.1f}" x2="{across.at(tick):.1f}" y1="4" y2="{height - 20:g}"/>'
        f'<text x="{across.at(tick):.1f}" y="{height - 5:g}" text-anchor="middle">{shown(tick)}</text>'
        for tick in (0.0, 0.25, 0.5, 0.75, 1.0)
    )
    drawn = "".join(
        _interval_row(name, role, value, 26.0 * place + 17, across)
        for place, (name, role, value) in enumerate(values)
    )
    return f"{_opened(label, height)}{ticks}{drawn}</svg>"


def _interval_row(name: str, role: str, value: Interval, y: float, across: Axis) -> str:
    return (
        f'<g class="{role}"><text class="name" x="0" y="{y + 4:g}">{html.escape(name)}</text>'
        f'<line class="whisker wide" x1="{across.at(value.low):.1f}" x2="{across.at(value.high):.1f}" y1="{y:g}" y2="{y:g}"/>'
        f'<circle class="dot" cx="{across.at(value.mean):.1f}" cy="{y:g}" r="5.5"/>'
        f'<text class="value" x="{WIDTH:g}" y="{y + 4:g}" text-anchor="end">{value.mean:.2f}</text></g>'
    )


def _opened(label: str, height: float = HEIGHT) -> str:
    """The beginning of a drawing, with what it shows for those who do not see it."""
    return f'<svg class="plot" viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{html.escape(label)}">'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Names with their colours; `entries` are (name, role) and a name is HTML."""
    return "".join(
        f'<span class="key"><i class="swatch {role}"></i>{name}</span>' for name, role in entries
    )


def legend_figure(chart: str, groups: Sequence[tuple[str, str, object]], more: str = "") -> str:
    """Put a chart above the legend of its groups, (name, role, values) each, and what else it says."""
    return f'<figure>{chart}<div class="legend">{legend([(name, role) for name, role, _ in groups])}{more}</div></figure>'
