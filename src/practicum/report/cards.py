"""Results as small pieces of HTML for the output of a notebook's cell, without separate styles."""

from collections.abc import Mapping, Sequence
from typing import Any

from practicum.report.markup import escape_text, format_number
from practicum.report.outcome_verdict import list_commands
from practicum.report.tables import ALL_DONE, DRAFT_ROWS


def render_card(
    headline: str,
    lines: Sequence[str] = (),
    columns: Sequence[str] = (),
    rows: Sequence[Sequence[str]] = (),
) -> str:
    """Render a headline, lines below it and a table; all of them are texts and are escaped."""
    parts = [f"<p><b>{escape_text(headline)}</b></p>"]
    parts += [f"<p>{escape_text(line)}</p>" for line in lines]
    if rows:
        head = "".join(f"<th>{escape_text(column)}</th>" for column in columns)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape_text(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    return f"<div>{''.join(parts)}</div>"


def render_run_card(name: str, folder: str, summary: Mapping[str, Any]) -> str:
    """Render the summary of a run: the verdict with its reasons, and the evaluations."""
    columns = {who: summary[who] for who in ("before", "after", "teacher") if summary[who]}
    quantities = {
        "accuracy": "accuracy",
        "reverse KL": "reverse_kl",
        "reverse KL (estimate)": "reverse_kl_estimate",
        **DRAFT_ROWS,
        "length": "length",
    }
    rows = [
        [label, *(format_number(column.get(key)) for column in columns.values())]
        for label, key in quantities.items()
        if key in ("accuracy", "reverse_kl", "length")
        or any(column.get(key) for column in columns.values())
    ]
    verdict = summary["verdict"]
    lines = [
        "; ".join(verdict["reasons"]),
        *(f"Try next: {command}" for command in list_commands(verdict, folder)),
        f"{summary['steps']} steps, {summary.get('ended', ALL_DONE)}; report.html is in {folder}",
    ]
    return render_card(f"{name}: {verdict['verdict']}", lines, ["", *columns], rows)


def describe_summary(summary: Mapping[str, Any]) -> str:
    """Return the verdict of a run with its first reason."""
    verdict = summary["verdict"]
    return f"{verdict['verdict']}: {verdict['reasons'][0]}"
