"""The page: its sections in order, in one file that cannot load anything."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from practicum.report import accounting, answers
from practicum.report.curves import build_curves_section
from practicum.report.heatmap import build_heatmap_section
from practicum.report.markup import Section, escape_text, render_policy
from practicum.report.run_data import RunData
from practicum.report.tokens import build_tokens_section
from practicum.report.turns import build_turns_section
from practicum.report.verdict import render_verdict

STYLE = files("practicum.report").joinpath("page.css").read_text(encoding="utf-8")
SCRIPT = files("practicum.report").joinpath("page.js").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class PageParts:
    """The parts of a page: HTML and link text of each section by id, and numbers for the script."""

    title: str
    about: str
    html: Mapping[str, str]
    links: Mapping[str, str]
    data: Mapping[str, Any]


def build_page_parts(run: RunData) -> PageParts:
    """Build the sections of a run's page, in order; a section without content is left out."""
    heat, heat_data = build_heatmap_section(run)
    curves, curves_data = build_curves_section(run)
    candidates = [
        heat,
        curves,
        accounting.build_alarms_section(run),
        answers.build_evaluation_section(run),
        build_tokens_section(run),
        build_turns_section(run),
        answers.build_lengths_section(run),
        answers.build_answers_section(run),
        accounting.build_dropped_section(run),
        accounting.build_doctor_section(run),
        accounting.build_reproduce_section(run),
    ]
    sections = [section for section in candidates if section is not None]
    return PageParts(
        title=run.name,
        about=str(run.recipe.get("about") or ""),
        html={
            "verdict": render_verdict(run),
            **{section.id: _render_section(section) for section in sections},
        },
        links={"verdict": "Verdict", **{section.id: section.link for section in sections}},
        data={"heat": heat_data, "charts": curves_data},
    )


def render_page(parts: PageParts, version: str | None = None) -> str:
    """Render the whole page; a page with a `version` is live and polls its server for changes."""
    is_live = version is not None
    status = '<p class="live" role="status"></p>' if is_live else ""
    state = f' data-live="{version}"' if is_live else ""
    title = escape_text(parts.title)
    server = "'self'" if is_live else "'none'"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"{render_policy(STYLE, SCRIPT, server=server)}<title>{title}</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head>"
        f'<body{state}><a class="skip" href="#verdict">to the verdict</a>'
        f'<header><h1>{title}</h1><p class="about">{escape_text(parts.about)}</p>{status}</header>'
        f'<nav aria-label="sections">{render_navigation(parts)}</nav>'
        f"<main>{''.join(parts.html.values())}</main>"
        "<footer>written by practicum, only from the run folder</footer>"
        f'<script type="application/json" id="data">{embed_json(parts.data)}</script>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def render_navigation(parts: PageParts) -> str:
    """Render the links to all sections."""
    return "".join(f'<a href="#{id}">{title}</a>' for id, title in parts.links.items())


def embed_json(data: object) -> str:
    """Encode JSON for a script element: no character can end the element or open a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _render_section(section: Section) -> str:
    about = f'<p class="about">{section.about}</p>' if section.about else ""
    return (
        f'<section id="{section.id}" aria-labelledby="{section.id}-title">'
        f'<h2 id="{section.id}-title">{section.title}</h2>{about}{section.body}</section>'
    )
