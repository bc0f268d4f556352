"""A reproduction as one small SVG: the arms' final numbers, and their curves against FLOPs."""

import html
import math
from collections.abc import Callable, Sequence
from itertools import chain

from laboratory.results import Results
from laboratory.study import LoadedReproduction, is_map, list_measures
from practicum.statistics import t_interval
from practicum.studies.compare import build_mean_curve
from practicum.studies.compare.comparison_page import COLOURS as ARM_COLOURS

COLOURS = (*ARM_COLOURS, "#12b886", "#e64980")
"""The colours of the arms: a reproduction has more of them than a comparison."""
CELL = 64
"""Width of a map's cell."""
ROW, TOP = 22, 26
"""Heights of an arm's row and of the heading."""
NAMES, LEFT, GAP, RIGHT = 150, 210, 60, 300
"""Widths of the arms' names, the left chart, the gap, and the right chart."""

STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#333}.h{font-weight:600}.g{stroke:#ddd}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}.g{stroke:#444}}"
)


def plot(study: LoadedReproduction, results: Results) -> str:
    """Return the SVG: means over seeds with 95 % intervals, and each seed as a dot."""
    if is_map(study) and results.tried:
        body, width, height = _draw_map(study, results)
    else:
        arms, measure = _choose_measure(study, results)
        height = TOP + max(len(arms), 6) * ROW + 30
        has_curves = any(results.curves.get(arm) for arm in arms) and measure == "accuracy"
        width = NAMES + LEFT + (GAP + RIGHT if has_curves else 20)
        body = _draw_ends(arms, results, measure, height)
        body += _draw_curves(arms, results, height) if has_curves else ""
    label = html.escape(f"{study.spec.question} ({results.form} form, {len(results.seeds)} seeds)")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" role="img" aria-label="{label}"><style>{STYLE}</style>{body}</svg>\n'
    )


def _draw_map(study: LoadedReproduction, results: Results) -> tuple[str, int, int]:
    """Return a map, with its width and height: a cell is an arm's accuracy at a learning rate."""
    rates = sorted({row["learning_rate"] for row in results.tried})
    arms = [arm for arm in study.spec.arms if any(row["arm"] == arm for row in results.tried)]
    parts = [f'<text class="h" x="{NAMES}" y="14">held-out accuracy by learning rate</text>']
    for row in results.tried:
        x, y = NAMES + rates.index(row["learning_rate"]) * CELL, TOP + arms.index(row["arm"]) * ROW
        score = row["accuracy"] or 0.0
        alarms = ", ".join(row.get("alarms", [])) or "no monitor spoke"
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{ROW - 2}" '
            f'fill="#2f6fde" fill-opacity="{0.06 + 0.8 * score:.2f}">'
            f"<title>{html.escape(row['arm'])} at {row['learning_rate']:g}: {score:.2f}; "
            f"{alarms}</title></rect>"
        )
        parts.append(_draw_text(x + CELL / 2 - 1, y + 14, f"{score:.2f}", "middle"))
    for index, arm in enumerate(arms):
        parts.append(_draw_name(arm, TOP + index * ROW + 14))
    bottom = TOP + len(arms) * ROW
    for index, rate in enumerate(rates):
        x = NAMES + index * CELL + CELL / 2 - 1
        parts.append(_draw_text(x, bottom + 14, f"{rate:g}", "middle"))
    return "".join(parts), NAMES + len(rates) * CELL + 20, bottom + 24


def _draw_text(x: float | str, y: float | str, text: str, anchor: str = "end") -> str:
    """Return an XML text that ends at x, or has its middle there."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _draw_name(arm: str, y: float) -> str:
    return _draw_text(NAMES - 8, y, html.escape(arm.replace("_", " ")))


def _choose_measure(study: LoadedReproduction, results: Results) -> tuple[list[str], str]:
    """Return the arms with the aim, or with the first measure of the claims that an arm has."""
    for measure in (study.spec.aim, *list_measures(study.spec)):
        arms = [arm for arm in study.spec.arms if results.readings.get(arm, {}).get(measure)]
        if arms:
            return arms, measure
    return [], "accuracy"


def _draw_ends(arms: Sequence[str], results: Results, measure: str, height: int) -> str:
    """Return a row per arm: dots for seeds, a point and a bar for the mean and its interval."""
    values = {arm: list(results.readings[arm][measure].values()) for arm in arms}
    low, high = _choose_limits(list(chain.from_iterable(values.values())))
    scale = _build_scale(low, high, NAMES, NAMES + LEFT)
    heading = f"{html.escape(measure.replace('_', ' '))} at the end"
    parts = [f'<text class="h" x="{NAMES}" y="14">{heading}</text>']
    parts += _draw_grid(low, high, scale, TOP, height - 30, vertical=True)
    for index, arm in enumerate(arms):
        y, colour = TOP + index * ROW + 12, COLOURS[index % len(COLOURS)]
        parts.append(_draw_name(arm, y + 4))
        parts += [
            f'<circle cx="{scale(number):.1f}" cy="{y}" r="2.5" fill="{colour}" opacity=".5"/>'
            for number in values[arm]
        ]
        interval = t_interval(values[arm])
        mean = sum(values[arm]) / len(values[arm])
        if interval is not None:
            start, end = scale(max(interval.low, low)), scale(min(interval.high, high))
            parts.append(
                f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{y}" y2="{y}" '
                f'stroke="{colour}" stroke-width="2.5"/>'
            )
        parts.append(
            f'<circle cx="{scale(mean):.1f}" cy="{y}" r="4" fill="{colour}">'
            f"<title>{html.escape(arm)} {mean:.3f}</title></circle>"
        )
    return "".join(parts)


def _draw_curves(arms: Sequence[str], results: Results, height: int) -> str:
    """Return the mean accuracy of each arm over its seeds, against FLOPs."""
    curves = {arm: _compute_mean_curve(results, arm) for arm in arms}
    max_flops = max((flops for curve in curves.values() for flops, _ in curve), default=1.0) or 1.0
    left_edge, bottom = NAMES + LEFT + GAP, height - 30
    scale_x = _build_scale(0.0, max_flops, left_edge, left_edge + RIGHT - 10)
    scale_y = _build_scale(0.0, 1.0, bottom, TOP)
    parts = [f'<text class="h" x="{left_edge}" y="14">accuracy against FLOPs</text>']
    parts += _draw_grid(0.0, max_flops, scale_x, TOP, bottom, vertical=True)
    parts += _draw_grid(0.0, 1.0, scale_y, left_edge, left_edge + RIGHT - 10, vertical=False)
    for index, arm in enumerate(arms):
        points = " ".join(
            f"{scale_x(flops):.1f},{scale_y(accuracy):.1f}" for flops, accuracy in curves[arm]
        )
        colour = COLOURS[index % len(COLOURS)]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8">'
            f"<title>{html.escape(arm)}</title></polyline>"
        )
    return "".join(parts)


def _compute_mean_curve(results: Results, arm: str) -> list[tuple[float, float]]:
    """Return FLOPs and accuracy along an arm's curve, as means over its seeds."""
    curves = results.curves.get(arm, {}).values()
    return build_mean_curve(
        [[(point.spent.get("flops", 0.0), point.accuracy) for point in curve] for curve in curves]
    )


def _choose_limits(values: Sequence[float]) -> tuple[float, float]:
    """Return 0 and 1 for shares, otherwise the range of the values with a margin."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    margin = 0.05 * ((high - low) or abs(high) or 1.0)
    return (0.0 if low >= 0 else low - margin), high + margin


def _build_scale(
    low: float, high: float, start: float | int, end: float | int
) -> Callable[[float | int], float]:
    return lambda number: start + (number - low) / ((high - low) or 1.0) * (end - start)


def _draw_grid(
    low: float,
    high: float,
    scale: Callable[[float], float],
    first: float | int,
    last: float | int,
    vertical: bool,
) -> list[str]:
    """Return lines at round numbers, from `first` to `last` across the axis, with the numbers."""
    # The step is the smallest 1, 2 or 5 times a power of ten that gives about four lines.
    rough = ((high - low) or 1.0) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    parts = []
    for index in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1):
        at, text = scale(index * step), f"{index * step:.3g}"
        if vertical:
            parts.append(f'<line class="g" x1="{at:.1f}" x2="{at:.1f}" y1="{first}" y2="{last}"/>')
            parts.append(_draw_text(f"{at:.1f}", last + 14, text, "middle"))
        else:
            parts.append(f'<line class="g" x1="{first}" x2="{last}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(_draw_text(first - 6, f"{at + 4:.1f}", text))
    return parts
