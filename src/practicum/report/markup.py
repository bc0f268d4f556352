"""Small pieces of HTML: escaped text, numbers, tables, bars and sections."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from practicum.text import make_printable


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: its name in addresses, what links call it, its heading, one line about it, and its HTML."""

    id: str
    link: str
    title: str
    about: str
    body: str


def safe(text: str, *, lines: bool = False) -> str:
    """Text of users and models: control and direction characters made visible, markup made plain."""
    shown = (
        "\n".join(make_printable(line) for line in text.splitlines())
        if lines
        else make_printable(text)
    )
    return html.escape(shown)


def number(value: Any) -> str:
    """Three digits, or a mean with its interval; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
    return f"{value:.3g}"


def count(value: float | int) -> str:
    """A count with its thousands apart, for example 12,800."""
    return f"{value:,.0f}"


def percent(share: float | int) -> str:
    """A share as 12.3 %, and 0 where there is nothing."""
    return f"{100 * share:.1f} %"


def seconds(value: float) -> str:
    """A span of time as a person says it, for example 2 min 5 s."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def table(
    head: Sequence[str],
    body: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    label: str = "",
    first: int | None = None,
    most: int | None = None,
) -> str:
    """A table of ready HTML cells, the first of each row its heading; the columns in `numbers` are set flush right.

    Of more rows than `first` the others, up to row `most`, are in a table that opens on demand.
    """
    if first is not None and len(body) > first:
        shown = table(head, body[:first], numbers=numbers, label=label)
        rest = table(head, body[first:most], numbers=numbers, label=f"more {label}")
        return shown + render_details(f"{count(len(body) - first)} more", rest)

    def kind(place: int) -> str:
        return ' class="n"' if place in numbers else ""

    def cell(place: int, content: str) -> str:
        return (
            f'<th scope="row">{content}</th>' if place == 0 else f"<td{kind(place)}>{content}</td>"
        )

    top = "".join(
        f'<th scope="col"{kind(place)}>{content}</th>' for place, content in enumerate(head)
    )
    rows = "".join(
        f"<tr>{''.join(cell(place, content) for place, content in enumerate(row))}</tr>"
        for row in body
    )
    name = html.escape(label or "table")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def panel(title: str, body: str) -> str:
    """Return one of several parts beside each other; nothing for an empty body."""
    return f'<div class="panel"><h3>{title}</h3>{body}</div>' if body else ""


def document(title: str, style: str, body: str) -> str:
    """Return a page that loads nothing; `title` and `body` are HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>'
        f"<body>{body}</body></html>\n"
    )


def bar(share: float | int) -> str:
    """A bar of a table's cell, filled to `share` of its width."""
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        f'<svg class="bar " viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="rail" width="100" height="8"/><rect class="fill" width="{width:.1f}" height="8"/></svg>'
    )


def note(text: str) -> str:
    """A sentence in small print; `text` is HTML."""
    return f'<p class="note">{text}</p>'


def render_details(title: str, body: str) -> str:
    """A part that opens on demand."""
    return f"<details><summary>{title}</summary>{body}</details>"
