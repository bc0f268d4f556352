"""Small pieces of HTML: escaped text, numbers, tables, bars and sections."""

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from practicum.text import make_printable

FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
"""A folder of a run relative to a page, as `RunDir` names it."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the page: id, text of links to it, heading, a line about it, and its HTML."""

    id: str
    link: str
    title: str
    about: str
    body: str


def escape_text(text: str, *, lines: bool = False) -> str:
    """Escape text of users and models: markup becomes plain, control characters become visible.

    Line breaks stay only with `lines`.
    """
    printable = "\n".join(map(make_printable, text.splitlines())) if lines else make_printable(text)
    return html.escape(printable)


def format_number(number: Any) -> str:
    """Format a number with three digits, or a mean with its interval or standard error.

    None becomes empty.
    """
    if number is None:
        return ""
    if isinstance(number, dict) and "se" in number:
        error = "" if number["se"] is None else f" ± {number['se']:.2g}"
        return f"{number['mean']:.3g}{error}"
    if isinstance(number, dict):
        return f"{number['mean']:.2f} [{number['low']:.2f}, {number['high']:.2f}]"
    return f"{number:.3g}"


def format_count(count: float | int) -> str:
    """Format a count with separated thousands, for example 12,800."""
    return f"{count:,.0f}"


def format_percent(share: float | int) -> str:
    """Format a share as a percentage, for example 12.3 %."""
    return f"{100 * share:.1f} %"


def format_duration(seconds: float) -> str:
    """Format a number of seconds, for example 2 min 5 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, full_seconds = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {full_seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


def render_table(
    head: Sequence[str],
    body: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    label: str = "",
    max_open: int | None = None,
    max_rows: int | None = None,
) -> str:
    """Render a table of HTML cells; the first cell of a row is its heading.

    The columns in `numbers` are aligned right. If there are more than `max_open` rows, further
    rows, up to row `max_rows`, are in a table that opens on demand.
    """
    if max_open is not None and len(body) > max_open:
        top = render_table(head, body[:max_open], numbers=numbers, label=label)
        more = render_table(head, body[max_open:max_rows], numbers=numbers, label=f"more {label}")
        return top + render_details(f"{format_count(len(body) - max_open)} more", more)
    kinds = [' class="n"' if column in numbers else "" for column in range(len(head))]
    titles = "".join(
        f'<th scope="col"{kind}>{title}</th>' for kind, title in zip(kinds, head, strict=True)
    )
    rows = ""
    for name, *row in body:
        cells = "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds[1:], row, strict=True))
        rows += f'<tr><th scope="row">{name}</th>{cells}</tr>'
    return (
        '<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{html.escape(label or "table")}">'
        f"<table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def render_pictures(paths: Iterable[Path]) -> str:
    """Render JPEG files in the page itself, next to the text about them."""
    return "".join(
        '<img class="picture" alt="a picture of the prompt" src="data:image/jpeg;base64,'
        f'{base64.b64encode(path.read_bytes()).decode()}">'
        for path in paths
    )


def render_panels(bodies: Mapping[str, str]) -> str:
    """Render panels next to each other, by title; a panel with an empty body is left out."""
    panels = "".join(
        f'<div class="panel"><h3>{title}</h3>{body}</div>' for title, body in bodies.items() if body
    )
    return f'<div class="panels">{panels}</div>'


def render_policy(style: str, script: str | None = None, *, server: str = "'none'") -> str:
    """Render a content security policy that allows this style and this script, and nothing else.

    Digests replace 'unsafe-inline': text of a model that slipped through as markup still could not
    run. `server` is the source that the page may connect to.
    """
    rules = [
        "default-src 'none'",
        f"style-src '{_digest(style)}'",
        f"script-src '{_digest(script)}'" if script is not None else "script-src 'none'",
        "img-src data:",
        f"connect-src {server}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">'


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def render_report_link(folder: str, text: str) -> str:
    """Render a link to the report of a run below this page; only the text if it leads elsewhere."""
    # A folder comes from a file: a scheme such as `javascript:` must not become a link.
    if FOLDER.fullmatch(folder) is None or ".." in folder.split("/"):
        return text
    return f'<a href="{html.escape(folder)}/report.html">{text}</a>'


def render_document(title: str, style: str, body: str) -> str:
    """Render a page that loads nothing; `title` and `body` are HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"{render_policy(style)}<title>{title}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body>{body}</body></html>\n"
    )


def render_bar(share: float | int) -> str:
    """Render a bar for a table's cell, filled to `share` of its width."""
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        '<svg class="bar " viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="rail" width="100" height="8"/>'
        f'<rect class="fill" width="{width:.1f}" height="8"/></svg>'
    )


def render_note(text: str) -> str:
    """Render a sentence of HTML in small print."""
    return f'<p class="note">{text}</p>'


def render_details(title: str, body: str) -> str:
    """Render a part that opens on demand."""
    return f"<details><summary>{title}</summary>{body}</details>"
