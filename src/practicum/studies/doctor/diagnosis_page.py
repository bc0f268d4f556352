"""The diagnosis as one HTML page that loads no other file, in the style of the report."""

from collections.abc import Collection
from typing import Any

from practicum.report import STYLE
from practicum.report.markup import escape_text, render_document, render_note, render_table
from practicum.statistics import Interval
from practicum.studies.doctor.findings import (
    STATUS_ORDER,
    describe_skipped,
    format_interval,
    format_number,
)

TONES = {"BROKEN-SETUP": "bad", "NO-GO": "bad", "GO": "good", "CHANGE-FIRST": "mixed"}
"""The colour of a verdict; all other verdicts have none."""


def choose_tone(word: str, statuses: Collection[str]) -> str:
    """Return the colour of a verdict, never green if a check fails."""
    tone = TONES.get(word, "")
    return "mixed" if tone == "good" and "fail" in statuses else tone


def render_page(diagnosis: dict[str, Any]) -> str:
    """Render the HTML page of a diagnosis from the content of its doctor.json."""
    verdict, name = diagnosis["verdict"], escape_text(diagnosis["name"])
    word = verdict["word"]
    tone = choose_tone(word, [check["status"] for check in diagnosis["checks"]])
    prompts, samples, seed = (diagnosis[key] for key in ("prompts", "samples", "seed"))
    sampled = f"{prompts} prompts, {samples} answers each, seed {seed}"
    # The table shows the sentence of each check, so only its name is shown here.
    because = ", ".join(line.partition(":")[0] for line in verdict["because"])
    meaning = escape_text(verdict["meaning"] + (f", because of {because}" if because else ""))
    body = (
        f'<header><h1>{name}</h1><p class="about">before training: {sampled}</p></header>'
        f'<main><section><p class="gain {tone}">{word}</p>'
        f'<p class="what">{meaning}</p></section>'
        f"<section><h2>SFT, OPD or RL?</h2><p>{escape_text(verdict['advice'])}</p></section>"
        f"{_render_list('Changes', diagnosis['changes'], code=True)}"
        f"<section><h2>Checks</h2>{_render_checks(diagnosis['checks'])}</section>"
        f"{_render_list('Published methods with this teacher', (diagnosis['methods'] or {}).get('lines', []))}"
        f"{_render_list('Notes from loading', diagnosis['remarks'])}</main>"
        "<footer>Intervals are 95 %, by bootstrap over prompts. "
        "Limits that are proposed here have no published support.</footer>"
    )
    return render_document(f"{name}: {word}", STYLE, body)


def _render_list(title: str, lines: list[str], *, code: bool = False) -> str:
    """Render a section with a list of lines; nothing without lines."""
    texts = [f"<code>{escape_text(line)}</code>" if code else escape_text(line) for line in lines]
    items = "".join(f"<li>{text}</li>" for text in texts)
    return f"<section><h2>{title}</h2><ul>{items}</ul></section>" if items else ""


def _render_checks(checks: list[dict[str, Any]]) -> str:
    """Render a row per applicable check, and a note per reason why a check does not apply."""
    applicable = [check for check in checks if check["status"] != "not applicable"]
    applicable.sort(key=lambda check: STATUS_ORDER.index(check["status"]))
    rows = [_build_row(check) for check in applicable]
    skipped = [(check["id"], check["status"], check["sentence"]) for check in checks]
    notes = "".join(render_note(escape_text(line)) for line in describe_skipped(skipped))
    return render_table(["check", "status", "number", "finding"], rows, label="checks") + notes


def _build_row(check: dict[str, Any]) -> list[str]:
    fix = "".join(f"<br><code>{escape_text(change)}</code>" for change in check["fix"])
    needs = f"<br>needs about {check['needs']} answers" if check["needs"] else ""
    numbers = {name: number for name, number in check["details"].items() if number is not None}
    details = "; ".join(f"{escape_text(name)} {format_number(numbers[name])}" for name in numbers)
    limits = (
        f"{f'{details}<br>' if details else ''}"
        f"pass / warn / fail: {escape_text(check['limits'])} "
        f"({escape_text(check['limits_from'])})<br>{escape_text(check['anchor'])}"
    )
    return [
        f"{check['id']} {escape_text(check['name'])}",
        f'<span class="status {check["status"]}">{check["status"]}</span>',
        _format_value(check),
        f"{escape_text(check['sentence'])}{needs}{fix}{render_note(limits)}",
    ]


def _format_value(check: dict[str, Any]) -> str:
    """Format a check's number; nothing if it or a bound of its interval is missing."""
    interval = check["value"]
    if interval is None or None in interval.values():
        return ""
    return escape_text(format_interval(Interval(**interval), check["unit"]))
