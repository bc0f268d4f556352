"""The curves of a run: every reading of metrics.jsonl over the steps, with marks at alarms."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from practicum.report.charts import (
    MIN_SMOOTHED_POINTS,
    Curve,
    EventMark,
    Timeline,
    downsample,
    format_tick,
    render_legend,
    render_line_chart,
)
from practicum.report.markup import Section, escape_text, render_details, render_note
from practicum.report.run_data import Row, RunData, is_divergence_estimated
from practicum.text import make_printable


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """A chart of readings that belong together, each as (key of metrics.jsonl, name, colour)."""

    title: str
    unit: str
    readings: tuple[tuple[str, str, str], ...]


CHARTS = {
    "reverse_kl": ChartSpec(
        "Reverse KL to the teacher", "nats per token", (("reverse_kl", "reverse KL", "student"),)
    ),
    "reward": ChartSpec("Reward", "mean while training", (("reward", "reward", "student"),)),
    "length": ChartSpec("Length", "tokens per answer", (("length", "length", "student"),)),
    "entropy": ChartSpec(
        "Entropies",
        "nats per token",
        (("student_entropy", "student", "student"), ("teacher_entropy", "teacher", "teacher")),
    ),
    "overlap": ChartSpec(
        "Overlap of the 16 most likely tokens",
        "share",
        (
            ("overlap", "tokens shared", "student"),
            ("overlap_mass", "student's mass on them", "third"),
        ),
    ),
    "grad_norm": ChartSpec(
        "Gradient norm", "before clipping", (("grad_norm", "gradient norm", "student"),)
    ),
    "truncated": ChartSpec(
        "Cut off",
        "share of answers",
        (("truncated", "cut off", "student"), ("empty", "empty", "before")),
    ),
    "repetition": ChartSpec(
        "Repetition",
        "share",
        (
            ("repetition", "answers that loop", "student"),
            ("repeated_tokens", "repeated tokens", "third"),
        ),
    ),
    "diversity": ChartSpec(
        "Diversity",
        "share",
        (
            ("unique_answers", "different answers of a prompt", "student"),
            ("distinct_2", "distinct 2-grams", "third"),
        ),
    ),
    "search": ChartSpec(
        "Search",
        "share, and mean reward of the steps",
        (
            ("search_value", "Q of the steps", "student"),
            ("search_solved", "prompts with a right answer", "third"),
            ("search_shared", "tokens shared", "before"),
        ),
    ),
    "loss": ChartSpec("Loss", "of each term, before weights", (("loss", "loss", "student"),)),
}
"""The charts that every reader looks for, in order."""

MAX_OTHERS = 40
"""The number of further readings that are drawn, at most."""

NOT_DRAWN = (
    "step",
    "rollouts",
    "tokens",
    "supervised",
    "from_student",
    "from_teacher",
    "from_dataset",
    "unsupervised_prompts",
    "reverse_kl_estimated",
)
"""Counts that the section about dropped data shows instead, and a mark that a title shows."""

ROLES = ("student", "third", "fourth", "before", "teacher")
"""The colours of readings without a fixed one, in order."""


def build_curves_section(run: RunData) -> tuple[Section | None, dict[str, Any]]:
    """Build the charts, and their numbers by chart for a reader who points at a curve."""
    charts = _choose_charts(run)
    if not charts:
        return None, {}
    time = Timeline(float(run.num_steps), [_mark_alarm(alarm) for alarm in run.alarms])
    main = other_charts = ""
    for id, (spec, curves) in charts.items():
        figure = _render_chart(id, spec, curves, time)
        if id.startswith("other-"):
            other_charts += figure
        else:
            main += figure
    hint = "Point at a curve to read it, or focus it and use the arrow keys."
    if len(run.metrics) >= MIN_SMOOTHED_POINTS:
        hint += " The bold line is a running mean."
    if time.marks:
        hint += " A flag is an alarm, with a line where it is about that reading: see below."
    body = f'{render_note(hint)}<div class="charts">{main}</div>'
    if other_charts:
        body += render_details("every other reading", f'<div class="charts">{other_charts}</div>')
    data = {id: {"curves": list(map(_collect_data, curves))} for id, (_, curves) in charts.items()}
    return Section("curves", "Curves", "While training", "one reading per step", body), data


def _mark_alarm(alarm: Row) -> EventMark:
    """Return an alarm as a mark on the time axis."""
    name = str(alarm.get("name", alarm.get("id", "alarm")))
    return EventMark(
        float(alarm["step"]),
        f"step {alarm['step']}: {make_printable(name)}",
        str(alarm.get("reading", name)),
    )


def _choose_charts(run: RunData) -> dict[str, tuple[ChartSpec, list[Curve]]]:
    """Return every chart that has a point, by its id in the page."""
    keys = list(dict.fromkeys(key for row in run.metrics for key in row))
    teachers, positions = _assign_roles(keys, "reverse_kl/"), _assign_roles(keys, "reverse_kl_at_")
    terms = _assign_roles([key for key in keys if key[5:].isdigit()], "loss_")
    specs = {
        **CHARTS,
        "teachers": ChartSpec("Reverse KL by teacher", "nats per token", teachers),
        "places": ChartSpec("Reverse KL by place", "nats per token, from place", positions),
        "terms": ChartSpec("Loss by term", "before weights", terms),
        # If a student only pleases a learned scorer, the gap rises and the agreement falls.
        "gaps": ChartSpec(
            "Scorers above the verifier", "mean score minus mean reward", _find_scorers(keys, "gap")
        ),
        "agreements": ChartSpec(
            "Scorers and the verifier", "right above wrong", _find_scorers(keys, "agreement")
        ),
    }
    if is_divergence_estimated(run):
        specs |= {id: _mark_estimate(specs[id]) for id in ("reverse_kl", "teachers", "places")}
    charts: dict[str, tuple[ChartSpec, list[Curve]]] = {}
    drawn_points: list[list[Any]] = []
    for id, spec in specs.items():
        curves = [_read_curve(run.metrics, *reading) for reading in spec.readings]
        curves = [curve for curve in curves if curve.points]
        points = [curve.points for curve in curves]
        # The loss of a single term, for one, repeats the chart of the whole loss.
        if curves and points not in drawn_points:
            charts[id] = (spec, curves)
            drawn_points.append(points)
    used = {key for spec in specs.values() for key, _, _ in spec.readings}
    other_keys = [key for key in keys if key not in used and key not in NOT_DRAWN]
    for index, key in enumerate(other_keys):
        reading = (key, escape_text(key), "student")
        curve = _read_curve(run.metrics, *reading)
        # A reading that never moves has no curve to look at.
        is_constant = len({value for _, value in curve.points}) <= 1
        if not is_constant and len(charts) < len(CHARTS) + MAX_OTHERS:
            charts[f"other-{index}"] = (ChartSpec(escape_text(key), "", (reading,)), [curve])
    return charts


def _mark_estimate(spec: ChartSpec) -> ChartSpec:
    """Return the chart with the word in its title, and in the name of a curve that repeats it."""
    readings = tuple(
        (key, f"{name} (estimate)" if name == "reverse KL" else name, role)
        for key, name, role in spec.readings
    )
    return replace(spec, title=f"{spec.title} (estimate)", readings=readings)


def _assign_roles(keys: Sequence[str], prefix: str) -> tuple[tuple[str, str, str], ...]:
    """Return the readings of the keys that start with a prefix; a curve is called what follows."""
    matching = [key for key in keys if key.startswith(prefix)]
    names = [escape_text(key.removeprefix(prefix)) for key in matching]
    return tuple(zip(matching, names, cycle(ROLES), strict=False))


def _find_scorers(keys: Sequence[str], number: str) -> tuple[tuple[str, str, str], ...]:
    """Return the readings of one number of each scorer; a curve is called after its scorer."""
    matching = [key for key in keys if key.startswith("scorer-") and key.endswith(f"/{number}")]
    names = [escape_text(key.removeprefix("scorer-").partition("/")[0]) for key in matching]
    return tuple(zip(matching, names, cycle(ROLES), strict=False))


def _read_curve(rows: Sequence[Row], key: str, name: str, role: str) -> Curve:
    points = [(float(row["step"]), float(row[key])) for row in rows if _is_number(row.get(key))]
    return Curve(name, role, points)


def _is_number(value: object) -> bool:
    # To Python a bool is an int, but it is no reading.
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _render_chart(id: str, spec: ChartSpec, curves: Sequence[Curve], time: Timeline) -> str:
    label = f"{html.unescape(spec.title)}, {spec.unit}: " + "; ".join(map(_describe, curves))
    unit = f' <span class="unit">{html.escape(spec.unit)}</span>' if spec.unit else ""
    names = [(curve.name, curve.role) for curve in curves] if len(curves) > 1 else []
    chart = render_line_chart(id, label, curves, time, [key for key, _, _ in spec.readings])
    # The newest values, until the reader points elsewhere.
    step = max(curve.points[-1][0] for curve in curves)
    values = " / ".join(f"{curve.points[-1][1]:.4g}" for curve in curves)
    return (
        f'<figure class="chart"><figcaption><b>{spec.title}</b>{unit}'
        f'<output class="reading">step {step:.0f}: {values}</output></figcaption>'
        f'{chart}<div class="legend">{render_legend(names)}</div></figure>'
    )


def _describe(curve: Curve) -> str:
    """Describe the two ends of a curve for readers who do not see it."""
    (first_step, first), (last_step, last) = curve.points[0], curve.points[-1]
    return (
        f"{html.unescape(curve.name)} {format_tick(first)} at step {first_step:.0f}, "
        f"{last:.4g} at step {last_step:.0f}"
    )


def _collect_data(curve: Curve) -> dict[str, Any]:
    """Return steps, values, name and role of a curve, for the page's script."""
    points = downsample(curve.points)
    return {
        # The script writes names as text, so an escaped one would show its entities.
        "name": html.unescape(curve.name),
        "role": curve.role,
        "steps": [step for step, _ in points],
        "values": [float(f"{value:.5g}") for _, value in points],
    }
