"""The report of a pipeline: one self-contained page with its stages, and what each of them learned and unlearned."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from practicum.report import STYLE, document, number, safe
from practicum.report.tables import ALL_DONE
from practicum.run_dir import read_json, shapes, write_text

WIDTH, HEIGHT, MARGIN, LABELS = 760, 360, 56, 80
"""Of the chart; its lowest part is for the names of the stages."""

WHOLE = "all"
"""The column and the line of the accuracy on all prompts."""

PIPELINE_STYLE = """
.legend span { display: inline-block; margin-right: 1rem; } .legend svg { width: .8rem; margin-right: .3rem; }
.stages { stroke-width: 1.5; fill: none; } .whole { stroke-width: 3; } th { font-weight: 600; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem; color: var(--soft); }
"""


def write_pipeline_report(folder: Path) -> Path:
    """Write `report.html` into a pipeline's folder from its pipeline.json and summary.json; returns its path."""
    path = folder / "report.html"
    pipeline = read_json(folder / "pipeline.json", shapes.PIPELINE)
    write_text(path, _page(pipeline, read_json(folder / "summary.json", shapes.PIPELINE_SUMMARY)))
    return path


def _page(pipeline: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    title = safe(summary["name"])
    notes = "".join(
        f"<dt>{key}</dt><dd>{safe(pipeline[key])}</dd>"
        for key in ("paper", "claim", "differs")
        if pipeline.get(key)
    )
    settings = safe(json.dumps(pipeline, indent=2, ensure_ascii=False), lines=True)
    body = (
        f'<h1>{title}</h1><p class="about">{safe(pipeline.get("about") or "")}</p><dl>{notes}</dl>'
        f"<h2>Stages</h2>{_stages(pipeline['stages'], summary['stages'])}{_accuracy(summary)}"
        f"<h2>Pipeline</h2><details><summary>every setting</summary><pre>{settings}</pre></details>"
    )
    return document(title, STYLE + PIPELINE_STYLE, body)


def _stages(stages: Sequence[Mapping[str, Any]], summaries: Sequence[Mapping[str, Any]]) -> str:
    columns = ("stage", "slot", "starts from", "method", "steps", "before", "after")
    head = "".join(f"<th>{column}</th>" for column in columns)
    rows = "".join(
        f'<tr><td><a href="{html.escape(summary["folder"])}/report.html">{safe(summary["name"])}</a></td>'
        f"<td>{safe((stage.get('slot') or '').replace('_', ' '))}</td><td>{safe(summary['start'])}</td>"
        f"<td>{safe(summary['method'])}</td><td>{summary['steps']}{_ended(summary)}</td>"
        f"<td>{_measured(summary['before'])}</td><td>{_measured(summary['after'])}</td></tr>"
        for stage, summary in zip(stages, summaries, strict=False)
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _ended(summary: Mapping[str, Any]) -> str:
    """What ended a stage before all of its steps were done."""
    ended = summary.get("ended", ALL_DONE)
    return "" if ended == ALL_DONE else f", {safe(ended)}"


def _measured(evaluation: Mapping[str, Any] | None) -> str:
    return "" if evaluation is None else number(evaluation["accuracy"])


def _accuracy(summary: Mapping[str, Any]) -> str:
    """The accuracy after each stage on each domain, as lines and as numbers."""
    if not summary["accuracy"]:
        return ""
    head = "".join(f"<th>{safe(name)}</th>" for name in (WHOLE, *summary["domains"]))
    rows = "".join(
        f"<tr><th>{safe(row['stage'])}</th>{''.join(f'<td>{number(value)}</td>' for value in _values(row, summary))}</tr>"
        for row in summary["accuracy"]
    )
    table = f'<div class="scroll"><table><tr><th>after</th>{head}</tr>{rows}</table></div>'
    return f"<h2>Held-out accuracy after each stage</h2>{_chart(summary)}{table}"


def _values(row: Mapping[str, Any], summary: Mapping[str, Any]) -> list[dict[str, float] | None]:
    """The accuracy of one stage on all prompts and on each domain."""
    return [row["all"], *(row["by_domain"].get(domain) for domain in summary["domains"])]


def _chart(summary: Mapping[str, Any]) -> str:
    """A line a domain over the stages, and a thick one for all prompts."""
    rows, bottom = summary["accuracy"], HEIGHT - LABELS
    across = (WIDTH - 2 * MARGIN) / max(len(rows) - 1, 1)
    names = [WHOLE, *summary["domains"]]
    values = [_values(row, summary) for row in rows]
    lines = "".join(
        _line(
            name,
            _colour(column, len(names)),
            [of_stage[column] for of_stage in values],
            [row["stage"] for row in rows],
        )
        for column, name in enumerate(names)
    )
    ticks = "".join(
        f'<text text-anchor="end" transform="translate({MARGIN + place * across:.1f} {bottom + 16}) rotate(-35)">'
        f"{safe(row['stage'])}</text>"
        for place, row in enumerate(rows)
    )
    legend = "".join(
        f'<span><svg viewBox="0 0 8 8"><rect width="8" height="8" fill="{_colour(column, len(names))}"/></svg>'
        f"{safe(name)}</span>"
        for column, name in enumerate(names)
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="accuracy by stage and domain">'
        f'<line class="axis" x1="{MARGIN}" y1="{bottom}" x2="{WIDTH - MARGIN}" y2="{bottom}"/>'
        f'<text x="16" y="20">1</text><text x="16" y="{bottom + 4}">0</text>{ticks}{lines}</svg>'
        f'<figcaption class="legend">{legend}</figcaption></figure>'
    )


def _line(
    name: str, colour: str, values: Sequence[Mapping[str, float] | None], stages: Sequence[str]
) -> str:
    """One domain over the stages, with a dot wherever it was measured."""
    bottom, across = HEIGHT - LABELS, (WIDTH - 2 * MARGIN) / max(len(stages) - 1, 1)
    dots = [
        (
            MARGIN + place * across,
            bottom - value["mean"] * (bottom - 16),
            f"{name} after {stage}: {value['mean']:.2f}",
        )
        for place, (stage, value) in enumerate(zip(stages, values, strict=True))
        if value is not None
    ]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in dots)
    circles = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{safe(text)}</title></circle>'
        for x, y, text in dots
    )
    whole = " whole" if name == WHOLE else ""
    return f'<polyline class="stages{whole}" stroke="{colour}" points="{points}"/>{circles}'


def _colour(place: int, count: int) -> str:
    """The text's colour for the first line, hues around the circle for the others."""
    return "currentColor" if place == 0 else f"hsl({360 * (place - 1) // (count - 1)} 70% 50%)"
