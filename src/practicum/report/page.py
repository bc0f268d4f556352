"""The page: its sections in order, and everything they need inside one file that can load nothing."""

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from practicum.report.accounting import (
    alarms_section,
    doctor_section,
    dropped_section,
    reproduce_section,
)
from practicum.report.answers import answers_section, evaluation_section, lengths_section
from practicum.report.curves import curves_section
from practicum.report.heatmap import heatmap_section
from practicum.report.markup import Section, safe
from practicum.report.reading import RunData
from practicum.report.tokens import tokens_section
from practicum.report.verdict import verdict

STYLE = files("practicum.report").joinpath("page.css").read_text(encoding="utf-8")
SCRIPT = files("practicum.report").joinpath("page.js").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class PageParts:
    """A page before it is put together: its sections as HTML by name, what links call them, the numbers under them."""

    title: str
    about: str
    html: Mapping[str, str]
    links: Mapping[str, str]
    data: Mapping[str, Any]


def parts_of(run: RunData) -> PageParts:
    """The parts of a run's page, in order."""
    heat, heat_data = heatmap_section(run)
    curves, curves_data = curves_section(run)
    sections = [
        heat,
        curves,
        alarms_section(run),
        evaluation_section(run),
        tokens_section(run),
        lengths_section(run),
        answers_section(run),
        dropped_section(run),
        doctor_section(run),
        reproduce_section(run),
    ]
    found = [section for section in sections if section is not None]
    return PageParts(
        title=run.name,
        about=str(run.recipe.get("about") or ""),
        html={"verdict": verdict(run), **{section.id: _section(section) for section in found}},
        links={"verdict": "Verdict", **{section.id: section.link for section in found}},
        data={"heat": heat_data, "charts": curves_data},
    )


def page(parts: PageParts, version: str | None = None) -> str:
    """The whole page; one with a `version` is live: it asks the server that it came from for news, and nobody else."""
    live = version is not None
    status = '<p class="live" role="status"></p>' if live else ""
    state = f' data-live="{version}"' if live else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{_policy(live)}<title>{safe(parts.title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f'<body{state}><a class="skip" href="#verdict">to the verdict</a>'
        f'<header><h1>{safe(parts.title)}</h1><p class="about">{safe(parts.about)}</p>{status}</header>'
        f'<nav aria-label="sections">{navigation(parts)}</nav><main>{"".join(parts.html.values())}</main>'
        f"<footer>written by practicum from the run folder alone</footer>"
        f'<script type="application/json" id="data">{embedded(parts.data)}</script><script>{SCRIPT}</script></body></html>\n'
    )


def navigation(parts: PageParts) -> str:
    """The way to each section."""
    return "".join(f'<a href="#{id}">{title}</a>' for id, title in parts.links.items())


def embedded(data: object) -> str:
    """JSON that stands inside a script element: no character of it can end the element or begin a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _section(section: Section) -> str:
    about = f'<p class="about">{section.about}</p>' if section.about else ""
    return (
        f'<section id="{section.id}" aria-labelledby="{section.id}-title"><h2 id="{section.id}-title">{section.title}</h2>'
        f"{about}{section.body}</section>"
    )


def _policy(live: bool) -> str:
    """The content security policy: this style, this script, nothing from anywhere; a live page may ask its own server."""
    server = "'self'" if live else "'none'"
    rules = [
        "default-src 'none'",
        f"style-src '{_digest(STYLE)}'",
        f"script-src '{_digest(SCRIPT)}'",
        f"connect-src {server}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">'


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
