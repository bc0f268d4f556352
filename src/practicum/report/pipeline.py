"""The report of a pipeline: one self-contained page with its stages and the accuracy after each."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from practicum.report import STYLE, escape_text, render_document
from practicum.report.markup import format_number, render_report_link
from practicum.report.tables import ALL_DONE
from practicum.run_dir import read_json, shapes, write_text

WIDTH, HEIGHT, MARGIN, LABEL_HEIGHT = 760, 360, 56, 80
"""The size of the chart; its lowest part is for the names of the stages."""

BOTTOM = HEIGHT - LABEL_HEIGHT

ALL_PROMPTS = "all"
"""The name of the accuracy on all prompts, as a column and as a line."""

PIPELINE_STYLE = """
.legend span { display: inline-block; margin-right: 1rem; }
.legend svg { width: .8rem; margin-right: .3rem; }
.stages { stroke-width: 1.5; fill: none; } .whole { stroke-width: 3; } th { font-weight: 600; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem; color: var(--soft); }
"""


def write_pipeline_report(folder: Path) -> Path:
    """Write `report.html` into a pipeline's folder from its two JSON files; return its path."""
    path = folder / "report.html"
    pipeline = read_json(folder / "pipeline.json", shapes.PIPELINE)
    summary = read_json(folder / "summary.json", shapes.PIPELINE_SUMMARY)
    write_text(path, _render_page(pipeline, summary))
    return path


def _render_page(pipeline: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    title = escape_text(summary["name"])
    notes = "".join(
        f"<dt>{key}</dt><dd>{escape_text(pipeline[key])}</dd>"
        for key in ("paper", "claim", "differs")
        if pipeline.get(key)
    )
    settings = escape_text(json.dumps(pipeline, indent=2, ensure_ascii=False), lines=True)
    stages = _render_stages(pipeline["stages"], summary["stages"])
    body = (
        f'<h1>{title}</h1><p class="about">{escape_text(pipeline.get("about") or "")}</p><dl>{notes}</dl>'
        f"<h2>Stages</h2>{stages}{_render_accuracy(summary)}"
        f"<h2>Pipeline</h2><details><summary>every setting</summary><pre>{settings}</pre></details>"
    )
    return render_document(title, STYLE + PIPELINE_STYLE, body)


def _render_stages(
    stages: Sequence[Mapping[str, Any]], summaries: Sequence[Mapping[str, Any]]
) -> str:
    columns = ("stage", "slot", "starts from", "method", "steps", "before", "after")
    head = "".join(f"<th>{column}</th>" for column in columns)
    rows = ""
    # A pipeline that is still going has fewer summaries than stages.
    for stage, summary in zip(stages, summaries, strict=False):
        link = render_report_link(summary["folder"], escape_text(summary["name"]))
        slot = escape_text((stage.get("slot") or "").replace("_", " "))
        ended = summary.get("ended", ALL_DONE)
        steps = f"{summary['steps']}" + ("" if ended == ALL_DONE else f", {escape_text(ended)}")
        before, after = (
            "" if summary[when] is None else format_number(summary[when]["accuracy"])
            for when in ("before", "after")
        )
        rows += (
            f"<tr><td>{link}</td>"
            f"<td>{slot}</td><td>{escape_text(summary['start'])}</td><td>{escape_text(summary['method'])}</td>"
            f"<td>{steps}</td><td>{before}</td><td>{after}</td></tr>"
        )
    return f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _render_accuracy(summary: Mapping[str, Any]) -> str:
    """Render the accuracy after each stage on each domain, as lines and as numbers."""
    if not summary["accuracy"]:
        return ""
    head = "".join(f"<th>{escape_text(name)}</th>" for name in (ALL_PROMPTS, *summary["domains"]))
    rows = ""
    for row in summary["accuracy"]:
        cells = "".join(f"<td>{format_number(mean)}</td>" for mean in _list_values(row, summary))
        rows += f"<tr><th>{escape_text(row['stage'])}</th>{cells}</tr>"
    table = f'<div class="scroll"><table><tr><th>after</th>{head}</tr>{rows}</table></div>'
    return f"<h2>Held-out accuracy after each stage</h2>{_render_chart(summary)}{table}"


def _list_values(
    row: Mapping[str, Any], summary: Mapping[str, Any]
) -> list[dict[str, float] | None]:
    """Return the accuracy after a stage on all prompts and on each domain."""
    return [row["all"], *(row["by_domain"].get(domain) for domain in summary["domains"])]


def _render_chart(summary: Mapping[str, Any]) -> str:
    """Render a line per domain over the stages, and a thick line for all prompts."""
    stages = [row["stage"] for row in summary["accuracy"]]
    xs = _place_stages(len(stages))
    ticks = "".join(
        f'<text text-anchor="end" transform="translate({x:.1f} {BOTTOM + 16}) rotate(-35)">'
        f"{escape_text(stage)}</text>"
        for x, stage in zip(xs, stages, strict=True)
    )
    names = [ALL_PROMPTS, *summary["domains"]]
    values = [_list_values(row, summary) for row in summary["accuracy"]]
    lines = legend = ""
    for index, name in enumerate(names):
        # The first line has the text's colour; all further lines share the circle of hues evenly.
        hue = 360 * (index - 1) // max(len(names) - 1, 1)
        colour = "currentColor" if index == 0 else f"hsl({hue} 70% 50%)"
        lines += _render_line(name, colour, [row[index] for row in values], stages)
        legend += (
            f'<span><svg viewBox="0 0 8 8"><rect width="8" height="8" fill="{colour}"/></svg>'
            f"{escape_text(name)}</span>"
        )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="accuracy by stage and domain">'
        f'<line class="axis" x1="{MARGIN}" y1="{BOTTOM}" x2="{WIDTH - MARGIN}" y2="{BOTTOM}"/>'
        f'<text x="16" y="20">1</text><text x="16" y="{BOTTOM + 4}">0</text>{ticks}{lines}</svg>'
        f'<figcaption class="legend">{legend}</figcaption></figure>'
    )


def _place_stages(count: int) -> list[float]:
    return [MARGIN + index * ((WIDTH - 2 * MARGIN) / max(count - 1, 1)) for index in range(count)]


def _render_line(
    name: str, colour: str, values: Sequence[Mapping[str, float] | None], stages: Sequence[str]
) -> str:
    """Render a domain over the stages, with a dot wherever it was measured."""
    points, dots = [], ""
    for x, stage, value in zip(_place_stages(len(stages)), stages, values, strict=True):
        if value is None:
            continue
        y = BOTTOM - value["mean"] * (BOTTOM - 16)
        points.append(f"{x:.1f},{y:.1f}")
        title = escape_text(f"{name} after {stage}: {value['mean']:.2f}")
        dots += (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{title}</title>'
            "</circle>"
        )
    thick = " whole" if name == ALL_PROMPTS else ""
    return f'<polyline class="stages{thick}" stroke="{colour}" points="{" ".join(points)}"/>{dots}'
