"""A reproduction as one small SVG: where every arm ended, and its way there against what it spent."""

import html
import math
from collections.abc import Callable, Sequence

from laboratory.results import Results
from laboratory.study import LoadedReproduction, is_map, measures_of
from practicum.statistics import t_interval
from practicum.studies.compare import mean_curve

COLOURS = (
    "#2f6fde",
    "#d9480f",
    "#2b8a3e",
    "#9c36b5",
    "#c2255c",
    "#0b7285",
    "#a67c00",
    "#5c677d",
    "#12b886",
    "#e64980",
)
CELL = 64
"""The width of a cell of a map."""
ROW, TOP, NAMES, LEFT, GAP, RIGHT = 22, 26, 150, 210, 60, 300
"""The height of an arm's row, the room above, for names, of the left chart, between both, and of the right one."""

STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#333}.h{font-weight:600}.g{stroke:#ddd}"
    "@media(prefers-color-scheme:dark){text{fill:#ccc}.g{stroke:#444}}"
)


def plot(study: LoadedReproduction, results: Results) -> str:
    """The SVG, with the arms that have the measure; the means over seeds with their 95 % interval, and every seed as a dot."""
    if is_map(study) and results.tried:
        return _framed(study, results, *_map(study, results))
    measure = study.spec.aim
    arms = [arm for arm in study.spec.arms if results.readings.get(arm, {}).get(measure)]
    if not arms:
        arms, measure = _other_measure(study, results)
    height = TOP + max(len(arms), 6) * ROW + 30
    curves = any(results.curves.get(arm) for arm in arms) and measure == "accuracy"
    width = NAMES + LEFT + (GAP + RIGHT if curves else 20)
    body = _ends(arms, results, measure, height) + (_ways(arms, results, height) if curves else "")
    return _framed(study, results, body, width, height)


def _framed(study: LoadedReproduction, results: Results, body: str, width: int, height: int) -> str:
    label = html.escape(f"{study.spec.question} ({results.form} form, {len(results.seeds)} seeds)")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="{label}"><style>{STYLE}</style>{body}</svg>\n'
    )


def _map(study: LoadedReproduction, results: Results) -> tuple[str, int, int]:
    """The accuracy of each arm at each learning rate as a shade and a number, with its width and height."""
    rates = sorted({row["learning_rate"] for row in results.tried})
    arms = [arm for arm in study.spec.arms if any(row["arm"] == arm for row in results.tried)]
    parts = [f'<text class="h" x="{NAMES}" y="14">held-out accuracy by learning rate</text>']
    for row in results.tried:
        x, y = NAMES + rates.index(row["learning_rate"]) * CELL, TOP + arms.index(row["arm"]) * ROW
        score = row["accuracy"] or 0.0
        spoke = ", ".join(row.get("alarms", [])) or "no monitor spoke"
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{ROW - 2}" fill="#2f6fde" fill-opacity="{0.06 + 0.8 * score:.2f}">'
            f"<title>{html.escape(row['arm'])} at {row['learning_rate']:g}: {score:.2f}; {spoke}</title></rect>"
            + _text(x + CELL / 2 - 1, y + 14, f"{score:.2f}", "middle")
        )
    for number, arm in enumerate(arms):
        parts.append(_text(NAMES - 8, TOP + number * ROW + 14, html.escape(arm.replace("_", " "))))
    bottom = TOP + len(arms) * ROW
    for place, rate in enumerate(rates):
        parts.append(_text(NAMES + place * CELL + CELL / 2 - 1, bottom + 14, f"{rate:g}", "middle"))
    return "".join(parts), NAMES + len(rates) * CELL + 20, bottom + 24


def _text(x: float | str, y: float | str, text: str, anchor: str = "end") -> str:
    """Write a text, which is XML, that ends at a place or has its middle there."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _other_measure(study: LoadedReproduction, results: Results) -> tuple[list[str], str]:
    """The first measure that the claims speak of and some arm has."""
    for measure in measures_of(study.spec):
        arms = [arm for arm in study.spec.arms if results.readings.get(arm, {}).get(measure)]
        if arms:
            return arms, measure
    return [], "accuracy"


def _ends(arms: Sequence[str], results: Results, measure: str, height: int) -> str:
    """One row an arm: dots for seeds, a point and a bar for the mean and its interval."""
    values = {arm: list(results.readings[arm][measure].values()) for arm in arms}
    low, high = _limits([value for mine in values.values() for value in mine])
    place = _axis(low, high, NAMES, NAMES + LEFT)
    parts = [
        f'<text class="h" x="{NAMES}" y="14">{html.escape(measure.replace("_", " "))} at the end</text>'
    ]
    parts += _grid(low, high, place, TOP, height - 30, vertical=True)
    for number, arm in enumerate(arms):
        y, colour = TOP + number * ROW + 12, COLOURS[number % len(COLOURS)]
        parts.append(_text(NAMES - 8, y + 4, html.escape(arm.replace("_", " "))))
        parts += [
            f'<circle cx="{place(value):.1f}" cy="{y}" r="2.5" fill="{colour}" opacity=".5"/>'
            for value in values[arm]
        ]
        interval = t_interval(values[arm])
        mean = sum(values[arm]) / len(values[arm])
        if interval is not None:
            start, end = place(max(interval.low, low)), place(min(interval.high, high))
            parts.append(
                f'<line x1="{start:.1f}" x2="{end:.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2.5"/>'
            )
        parts.append(
            f'<circle cx="{place(mean):.1f}" cy="{y}" r="4" fill="{colour}"><title>{html.escape(arm)} {mean:.3f}</title></circle>'
        )
    return "".join(parts)


def _ways(arms: Sequence[str], results: Results, height: int) -> str:
    """The mean accuracy of each arm over the seeds, against FLOPs."""
    curves = {arm: _mean_way(results, arm) for arm in arms}
    ends = [flops for curve in curves.values() for flops, _ in curve]
    left, bottom = NAMES + LEFT + GAP, height - 30
    across = _axis(0.0, max(ends, default=1.0) or 1.0, left, left + RIGHT - 10)
    up = _axis(0.0, 1.0, bottom, TOP)
    parts = [f'<text class="h" x="{left}" y="14">accuracy against FLOPs</text>']
    parts += _grid(0.0, max(ends, default=1.0) or 1.0, across, TOP, bottom, vertical=True)
    parts += _grid(0.0, 1.0, up, left, left + RIGHT - 10, vertical=False)
    for number, arm in enumerate(arms):
        points = " ".join(
            f"{across(flops):.1f},{up(accuracy):.1f}" for flops, accuracy in curves[arm]
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[number % len(COLOURS)]}" stroke-width="1.8">'
            f"<title>{html.escape(arm)}</title></polyline>"
        )
    return "".join(parts)


def _mean_way(results: Results, arm: str) -> list[tuple[float, float]]:
    """Return the FLOPs and the accuracy of an arm's moments, each as a mean over its seeds."""
    curves = results.curves.get(arm, {}).values()
    return mean_curve(
        [[(point.spent.get("flops", 0.0), point.accuracy) for point in curve] for curve in curves]
    )


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """From 0 to 1 for shares, else a little around the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    room = 0.05 * ((high - low) or abs(high) or 1.0)
    return (0.0 if low >= 0 else low - room), high + room


def _axis(
    low: float, high: float, start: float | int, end: float | int
) -> Callable[[float | int], float]:
    return lambda value: start + (value - low) / ((high - low) or 1.0) * (end - start)


def _grid(
    low: float,
    high: float,
    place: Callable[[float], float],
    first: float | int,
    last: float | int,
    vertical: bool,
) -> list[str]:
    """Lines at round values with their numbers."""
    rough = ((high - low) or 1.0) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    parts = []
    for number in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1):
        at, text = place(number * step), f"{number * step:.3g}"
        if vertical:
            parts.append(f'<line class="g" x1="{at:.1f}" x2="{at:.1f}" y1="{first}" y2="{last}"/>')
            parts.append(_text(f"{at:.1f}", last + 14, text, "middle"))
        else:
            parts.append(f'<line class="g" x1="{first}" x2="{last}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(_text(first - 6, f"{at + 4:.1f}", text))
    return parts
