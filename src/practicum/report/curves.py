"""The curves of a run: every reading of metrics.jsonl over the steps, with the alarms on the time axis."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from practicum.report.charts import (
    MOST_POINTS,
    Curve,
    EventMark,
    Timeline,
    downsample,
    legend,
    line_chart,
    shown,
)
from practicum.report.markup import Section, note, render_details, safe
from practicum.report.reading import Row, RunData
from practicum.text import make_printable


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """A chart of readings that belong together: (key of metrics.jsonl, name, colour)."""

    title: str
    unit: str
    readings: tuple[tuple[str, str, str], ...]


WANTED = {
    "reverse_kl": ChartSpec(
        "Reverse KL to the teacher", "nats a token", (("reverse_kl", "reverse KL", "student"),)
    ),
    "reward": ChartSpec("Reward", "mean while training", (("reward", "reward", "student"),)),
    "length": ChartSpec("Length", "tokens an answer", (("length", "length", "student"),)),
    "entropy": ChartSpec(
        "Entropies",
        "nats a token",
        (("student_entropy", "student", "student"), ("teacher_entropy", "teacher", "teacher")),
    ),
    "overlap": ChartSpec(
        "Overlap of the 16 likeliest tokens",
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
    "loss": ChartSpec("Loss", "of each term, before weights", (("loss", "loss", "student"),)),
}
"""The charts that every reader looks for, in their order."""

OTHERS = 40
"""At most so many further readings are drawn."""

NOT_DRAWN = (
    "step",
    "rollouts",
    "tokens",
    "supervised",
    "from_student",
    "from_teacher",
    "from_dataset",
    "unsupervised_prompts",
)
"""Counts that the panel about what was dropped has."""

ROLES = ("student", "third", "fourth", "before", "teacher")
"""Colours, in the order in which readings without one of their own take them."""


def curves_section(run: RunData) -> tuple[Section | None, dict[str, Any]]:
    """The charts, and the numbers under them by chart, for the reader who points at one."""
    charts = _charts(run)
    if not charts:
        return None, {}
    marks = [mark_of(alarm) for alarm in run.alarms]
    time = Timeline(float(run.steps), marks)
    drawn = {id: _figure(id, wanted, curves, time) for id, (wanted, curves) in charts.items()}
    main = "".join(drawing for id, drawing in drawn.items() if not id.startswith("other-"))
    rest = "".join(drawing for id, drawing in drawn.items() if id.startswith("other-"))
    more = (
        render_details("every other reading", f'<div class="charts">{rest}</div>') if rest else ""
    )
    hint = "Point at a curve to read it, or focus it and use the arrow keys."
    smooth = " The bold line is a running mean." if len(run.metrics) >= 80 else ""
    flags = (
        " A flag is an alarm, with a line where it is about that reading: see below."
        if marks
        else ""
    )
    body = f'{note(hint + smooth + flags)}<div class="charts">{main}</div>{more}'
    return Section("curves", "Curves", "While training", "one reading a step", body), {
        id: _data(curves) for id, (_, curves) in charts.items()
    }


def mark_of(alarm: Row) -> EventMark:
    """An alarm as a mark on the time axis."""
    name = str(alarm.get("name", alarm.get("id", "alarm")))
    return EventMark(
        float(alarm["step"]),
        f"step {alarm['step']}: {make_printable(name)}",
        str(alarm.get("reading", name)),
    )


def _charts(run: RunData) -> dict[str, tuple[ChartSpec, list[Curve]]]:
    """Every chart that has a point, by its name in the page."""
    found: dict[str, tuple[ChartSpec, list[Curve]]] = {}
    used = {key for wanted in WANTED.values() for key, _, _ in wanted.readings}
    keys = list(dict.fromkeys(key for row in run.metrics for key in row))
    teachers = [key for key in keys if key.startswith("reverse_kl/")]
    places = [key for key in keys if key.startswith("reverse_kl_at_")]
    terms = [key for key in keys if key.startswith("loss_") and key[5:].isdigit()]
    several = {
        "teachers": ChartSpec(
            "Reverse KL by teacher", "nats a token", _roles(teachers, "reverse_kl/")
        ),
        "places": ChartSpec(
            "Reverse KL by place", "nats a token, from place", _roles(places, "reverse_kl_at_")
        ),
        "terms": ChartSpec("Loss by term", "before weights", _roles(terms, "loss_")),
    }
    for id, wanted in {**WANTED, **several}.items():
        curves = [
            curve
            for key, name, role in wanted.readings
            if (curve := _curve(run.metrics, key, name, role)).points
        ]
        if curves and [curve.points for curve in curves] not in [
            [curve.points for curve in drawn] for _, drawn in found.values()
        ]:
            found[id] = (wanted, curves)
    rest = [
        key
        for key in keys
        if key not in used and key not in NOT_DRAWN and key not in (*teachers, *places, *terms)
    ]
    for place, key in enumerate(rest):
        curve = _curve(run.metrics, key, safe(key), "student")
        if len({value for _, value in curve.points}) > 1 and len(found) < len(WANTED) + OTHERS:
            found[f"other-{place}"] = (
                ChartSpec(safe(key), "", ((key, safe(key), "student"),)),
                [curve],
            )
    return found


def _roles(keys: Sequence[str], prefix: str) -> tuple[tuple[str, str, str], ...]:
    return tuple(
        (key, safe(key.removeprefix(prefix)), ROLES[place % len(ROLES)])
        for place, key in enumerate(keys)
    )


def _curve(rows: Sequence[Row], key: str, name: str, role: str) -> Curve:
    points = [(float(row["step"]), float(row[key])) for row in rows if _is_number(row.get(key))]
    return Curve(name, role, points)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _figure(id: str, wanted: ChartSpec, curves: Sequence[Curve], time: Timeline) -> str:
    label = f"{html.unescape(wanted.title)}, {wanted.unit}: " + "; ".join(
        f"{html.unescape(curve.name)} {shown(curve.points[0][1])} at step {curve.points[0][0]:.0f}, "
        f"{curve.points[-1][1]:.4g} at step {curve.points[-1][0]:.0f}"
        for curve in curves
    )
    unit = f' <span class="unit">{html.escape(wanted.unit)}</span>' if wanted.unit else ""
    keys = legend([(curve.name, curve.role) for curve in curves]) if len(curves) > 1 else ""
    return (
        f'<figure class="chart"><figcaption><b>{wanted.title}</b>{unit}'
        f'<output class="reading">{_last(curves)}</output></figcaption>'
        f'{line_chart(id, label, curves, time, [key for key, _, _ in wanted.readings])}<div class="legend">{keys}</div></figure>'
    )


def _last(curves: Sequence[Curve]) -> str:
    """The last values, as the reading says them until the reader points elsewhere."""
    step = max(curve.points[-1][0] for curve in curves)
    return f"step {step:.0f}: " + " / ".join(f"{curve.points[-1][1]:.4g}" for curve in curves)


def _data(curves: Sequence[Curve]) -> dict[str, Any]:
    """The points under the reader's finger: steps and values of each curve, and what colour and axis they have."""
    return {
        "curves": [
            {
                "name": html.unescape(curve.name),
                "role": curve.role,
                "steps": [step for step, _ in points],
                "values": [float(f"{value:.5g}") for _, value in points],
            }
            for curve in curves
            for points in [downsample(curve.points, MOST_POINTS)]
        ]
    }


def recent(metrics: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """The newest value of a reading; None where it was never taken."""
    return next((float(row[key]) for row in reversed(metrics) if _is_number(row.get(key))), None)
