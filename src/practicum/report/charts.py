"""Charts as SVG: curves over steps, points with intervals, bars, and a diagonal."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from practicum.statistics import Interval, group_pairs

WIDTH, HEIGHT = 400.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 14.0, 24.0
"""The margins around the plot, in the units of the drawing."""

GROUND, END = HEIGHT - BOTTOM, WIDTH - RIGHT
"""The lower edge of the plot, and its right edge."""

MAX_POINTS = 1200
"""A curve of more points is drawn by the lowest and the highest of each stretch."""

MIN_SMOOTHED_POINTS = 80
"""The number of points from which a curve is drawn with its running mean."""

QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart: its name, the role that gives its colour, and its points in order."""

    name: str
    role: str
    points: list[Point]


@dataclass(frozen=True, slots=True)
class EventMark:
    """An event at a step, and the reading that it refers to. Other charts show the event small."""

    step: float
    text: str
    reading: str = ""


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear map from values to coordinates: `low` to `high` become `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def project(self, value: float | int) -> float:
        """Return the coordinate of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def choose_ticks(self, most: int = 5) -> list[float]:
        """Return round values within the axis: multiples of 1, 2 or 5 times a power of ten."""
        step = _round_step((self.high - self.low) / most)
        # The tolerance keeps a tick on the very end that floating point puts just outside.
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    # A rough step of 0.1 can come out a little over 0.1: without the tolerance it would become 0.2.
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))


def fit_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis that holds the values, with round ends, from 0 unless a value is negative."""
    low, high = min(values), max(values)
    if low >= 0:
        low = 0.0
    if high <= low:
        low, high = (1.5 * low, 0.0) if low < 0 else (0.0, 1.5 * high or 1.0)
    step = _round_step((high - low) / 4)
    # A value barely over a tick does not cost the chart another step of empty space above it.
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-3) * step
    return Axis(low, high, start, end)


def format_tick(tick: float | int) -> str:
    """Format a tick's label, as short as it can be."""
    if abs(tick) < 1e-12:
        return "0"
    if 1e-3 <= abs(tick) < 1e5:
        text = f"{tick:.6f}".rstrip("0").rstrip(".")
        return f"{tick:,.0f}" if abs(tick) >= 1000 else text
    mantissa, _, exponent = f"{tick:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def downsample(points: Sequence[Point], max_points: int = MAX_POINTS) -> list[Point]:
    """Return up to `max_points`: the lowest and the highest of each stretch, so spikes survive."""
    if len(points) <= max_points:
        return list(points)
    stretches = max_points // 2
    edges = [index * len(points) // stretches for index in range(stretches + 1)]
    sampled: list[Point] = []
    for start, end in pairwise(edges):
        stretch = points[start:end]
        lowest = min(stretch, key=lambda point: point[1])
        highest = max(stretch, key=lambda point: point[1])
        sampled += sorted({lowest, highest})
    return sampled


def compute_running_mean(points: Sequence[Point]) -> list[Point]:
    """Return for each point the mean over a fortieth of the points, centred on it."""
    # Differences of prefix sums give every mean in constant time, however wide the window.
    reach = max(len(points) // 80, 1)
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    means = []
    for index, (step, _) in enumerate(points):
        low, high = max(index - reach, 0), min(index + reach + 1, len(points))
        means.append((step, (sums[high] - sums[low]) / (high - low)))
    return means


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps of a run with the events at them."""

    last: float
    marks: Sequence[EventMark]


def render_line_chart(
    id: str, label: str, curves: Sequence[Curve], time: Timeline, readings: Sequence[str]
) -> str:
    """Render curves over the steps, with a dashed line at each event about one of the `readings`.

    The page's script lets a reader walk the chart with the arrow keys.
    """
    steps = [step for curve in curves for step, _ in curve.points]
    first = min(steps)
    across = Axis(min(first, 1.0), max(time.last, max(steps), first + 1), LEFT, END)
    up = fit_axis([value for curve in curves for _, value in curve.points], GROUND, TOP)
    lines = "".join(_render_curve(curve, across, up) for curve in curves)
    ends = f'data-chart="{id}" data-low="{across.low:g}" data-high="{across.high:g}"'
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" tabindex="0" {ends} '
        f'aria-label="{html.escape(label)}">'
        f"{_render_grid(across, up)}{_render_marks(time.marks, across, readings)}{lines}"
        f'<g class="cursor" visibility="hidden"><line y1="{TOP:g}" y2="{GROUND:g}"/></g></svg>'
    )


def _render_grid(across: Axis, up: Axis) -> str:
    rows = "".join(_render_row(up, tick) for tick in up.choose_ticks(4))
    first = round(across.low)
    steps = {round(tick) for tick in across.choose_ticks(5) if tick >= across.low} | {first}
    # The first step is always labelled; a label within 34 units of it would overlap.
    min_x = across.project(across.low) + 34
    columns = "".join(
        _render_column(across, step, f"{step:,.0f}")
        for step in sorted(steps)
        if step == first or across.project(step) > min_x
    )
    return f"{rows}{_render_ground(f'{GROUND:g}')}{columns}"


def _render_ground(y: str) -> str:
    return f'<line class="axis" x1="{LEFT:g}" x2="{END:g}" y1="{y}" y2="{y}"/>'


def _render_row(up: Axis, tick: float) -> str:
    """Render a faint line at a value of the vertical axis, with its number."""
    y = up.project(tick)
    return (
        f'<line class="grid" x1="{LEFT:g}" x2="{END:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{format_tick(tick)}</text>'
    )


def _render_column(across: Axis, value: float | int, label: str) -> str:
    """Render a label, which is HTML, below a value of the horizontal axis."""
    x = across.project(value)
    return f'<text x="{x:.1f}" y="{HEIGHT - 7:g}" text-anchor="middle">{label}</text>'


def _render_marks(marks: Sequence[EventMark], across: Axis, readings: Sequence[str]) -> str:
    """Render a flag for each place with events; it has a dashed line if one is about the chart."""
    places = group_pairs((round(across.project(mark.step), 1), mark) for mark in marks)
    return "".join(
        _render_flag(x, group, is_about=any(mark.reading in readings for mark in group))
        for x, group in places.items()
    )


def _render_flag(x: float, marks: Sequence[EventMark], *, is_about: bool) -> str:
    title = "&#10;".join(html.escape(mark.text) for mark in marks)
    if not is_about:
        path = f'<path d="M{x - 2:.1f} {TOP - 6:g} h4 l-2 4 z"/>'
        return f'<g class="alarm other"><title>{title}</title>{path}</g>'
    line = f'<line x1="{x}" x2="{x}" y1="{TOP:g}" y2="{GROUND:g}"/>'
    path = f'<path d="M{x - 4:.1f} {TOP - 9:g} h8 l-4 8 z"/>'
    return f'<g class="alarm"><title>{title}</title>{line}{path}</g>'


def _render_curve(curve: Curve, across: Axis, up: Axis) -> str:
    def render_line(points: Sequence[Point], kind: str) -> str:
        places = " ".join(
            f"{across.project(step):.1f},{up.project(value):.1f}" for step, value in points
        )
        return f'<polyline class="curve {curve.role}{kind}" points="{places}"/>'

    points = downsample(curve.points)
    if len(points) == 1:
        step, value = points[0]
        return _render_dot(across.project(step), up.project(value), curve.role)
    if len(points) < MIN_SMOOTHED_POINTS:
        return render_line(points, "")
    mean = downsample(compute_running_mean(curve.points), 400)
    return render_line(points, " raw") + render_line(mean, "")


def _render_dot(x: float, y: float, role: str = "", title: str = "") -> str:
    kind = f"dot {role}".rstrip()
    circle = f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"'
    return f"{circle}><title>{title}</title></circle>" if title else f"{circle}/>"


Ranged = tuple[int, Interval]
"""The index of a place on the horizontal axis, and the mean with its interval there."""


def render_ranged_chart(
    label: str,
    groups: Sequence[tuple[str, str, Sequence[Ranged]]],
    names: Sequence[str],
    top: float | None = None,
) -> str:
    """Render points with intervals, a colour per group, at the places called `names`.

    `top` fixes the upper end.
    """
    intervals = [interval for _, _, group in groups for _, interval in group]
    # Zero is always on the axis, so only a low end below it can move the axis.
    lows = [interval.low for interval in intervals if interval.low < 0]
    highs = [interval.high for interval in intervals] if top is None else [top]
    up = fit_axis([0.0, *highs, *lows], GROUND, TOP)
    # Half a place of room on both sides keeps the outer points off the edges.
    across = Axis(-0.5, len(names) - 0.5, LEFT, END)
    drawing = ""
    for index, (name, role, group) in enumerate(groups):
        # Groups are drawn next to each other, 8 units apart, around their common place.
        offset = 8 * (index - (len(groups) - 1) / 2)
        points = [(across.project(place) + offset, interval) for place, interval in group]
        drawing += _render_ranged(name, role, points, up)
    return f"{_open_drawing(label)}{_render_frame(up, across, names)}{drawing}</svg>"


def _render_ranged(name: str, role: str, points: Sequence[tuple[float, Interval]], up: Axis) -> str:
    line = " ".join(f"{x:.1f},{up.project(interval.mean):.1f}" for x, interval in points)
    whiskers = ""
    for x, interval in points:
        low, high = up.project(interval.low), up.project(interval.high)
        whiskers += (
            f'<g class="{role}"><title>{html.escape(name)}: {interval:.3g}</title>'
            f'<line class="whisker" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            f"{_render_dot(x, up.project(interval.mean))}</g>"
        )
    return f'<polyline class="curve thin {role}" points="{line}"/>{whiskers}'


def render_bar_chart(
    label: str, groups: Sequence[tuple[str, str, Sequence[float]]], names: Sequence[str]
) -> str:
    """Render bars of shares side by side, a colour per group, at the places called `names`."""
    up = fit_axis([0.0, *(share for _, _, shares in groups for share in shares)], GROUND, TOP)
    across = Axis(-0.5, len(names) - 0.5, LEFT, END)
    width = 0.8 * (across.project(1) - across.project(0)) / len(groups)
    bars = ""
    for index, (name, role, shares) in enumerate(groups):
        for place, share in enumerate(shares):
            if share <= 0:
                continue
            x, y = across.project(place) + (index - len(groups) / 2) * width, up.project(share)
            bars += (
                f'<rect class="dot {role}" x="{x:.1f}" y="{y:.1f}" width="{max(width - 1, 1):.1f}" '
                f'height="{up.project(0) - y:.1f}" rx="1"><title>{html.escape(name)}, '
                f"{html.escape(names[place])}: {100 * share:.1f} %</title></rect>"
            )
    return f"{_open_drawing(label)}{_render_frame(up, across, names)}{bars}</svg>"


def _render_frame(up: Axis, across: Axis, names: Sequence[str]) -> str:
    """Render the grid of the vertical axis, and as many names as fit below the horizontal axis."""
    rows = "".join(_render_row(up, tick) for tick in up.choose_ticks(4))
    # A letter is about 7 units wide.
    label_width = max(map(len, names)) * 7 + 8
    stride = max(math.ceil(len(names) * label_width / (END - LEFT)), 1)
    columns = "".join(
        _render_column(across, place, html.escape(name))
        for place, name in enumerate(names)
        if place % stride == 0
    )
    return rows + _render_ground(f"{up.project(0.0):.1f}") + columns


def render_diagonal_chart(label: str, groups: Sequence[tuple[str, str, Sequence[Point]]]) -> str:
    """Render points of [0, 1] x [0, 1] with the diagonal of a calibrated model."""
    across, up = Axis(0.0, 1.0, LEFT, END), Axis(0.0, 1.0, GROUND, TOP)
    grid = "".join(
        _render_row(up, tick) + _render_column(across, tick, format_tick(tick)) for tick in QUARTERS
    )
    drawing = ""
    for name, role, points in groups:
        places = [(across.project(x), up.project(y)) for x, y in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawing += f'<polyline class="curve {role}" points="{line}"/>'
        for (x, y), (confidence, right) in zip(places, points, strict=True):
            title = f"{html.escape(name)}: confidence {confidence:.2f}, right {right:.2f}"
            drawing += _render_dot(x, y, role, title)
    return (
        f"{_open_drawing(label)}{grid}<line "
        f'class="ideal" x1="{LEFT:g}" y1="{GROUND:g}" x2="{END:g}" y2="{TOP:g}"/>{drawing}</svg>'
    )


def render_interval_rows(label: str, rows: Sequence[tuple[str, str, Interval]]) -> str:
    """Render one row each: a name, a dot with its interval on the scale from 0 to 1, the mean."""
    height = 26.0 * len(rows) + 24
    across = Axis(0.0, 1.0, 74.0, WIDTH - 62)
    drawing = ""
    for tick in QUARTERS:
        x = across.project(tick)
        drawing += (
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 20:g}"/>'
            f'<text x="{x:.1f}" y="{height - 5:g}" text-anchor="middle">{format_tick(tick)}</text>'
        )
    for index, (name, role, interval) in enumerate(rows):
        y = 26.0 * index + 17
        low, mean, high = map(across.project, (interval.low, interval.mean, interval.high))
        drawing += (
            f'<g class="{role}"><text class="name" x="0" y="{y + 4:g}">{html.escape(name)}</text>'
            f'<line class="whisker wide" x1="{low:.1f}" x2="{high:.1f}" y1="{y:g}" y2="{y:g}"/>'
            f'<circle class="dot" cx="{mean:.1f}" cy="{y:g}" r="5.5"/><text '
            f'class="value" x="{WIDTH:g}" y="{y + 4:g}" text-anchor="end">{interval.mean:.2f}'
            "</text></g>"
        )
    return f"{_open_drawing(label, height)}{drawing}</svg>"


def _open_drawing(label: str, height: float = HEIGHT) -> str:
    """Open a drawing, with a label for readers who do not see it."""
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH:g} {height:g}" role="img" '
        f'aria-label="{html.escape(label)}">'
    )


def render_legend(entries: Sequence[tuple[str, str]]) -> str:
    """Render names with their colours; `entries` are (name, role) and a name is HTML."""
    return "".join(
        f'<span class="key"><i class="swatch {role}"></i>{name}</span>' for name, role in entries
    )


def render_figure(chart: str, groups: Sequence[tuple[str, str, object]], more: str = "") -> str:
    """Render a chart above the legend of its groups, (name, role, values) each, and more HTML."""
    legend = render_legend([(name, role) for name, role, _ in groups])
    return f'<figure>{chart}<div class="legend">{legend}{more}</div></figure>'
