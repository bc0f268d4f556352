"""The diagnosis as one HTML page that loads no other file."""

from typing import Any

from practicum.report import escape_text, render_document
from practicum.statistics import Interval
from practicum.studies.doctor.findings import format_interval, format_number

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #667085; --line: #d5dae3;
  --paper: #ffffff; --pass: #17803d; --warn: #9a6700; --fail: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #344054;
  --paper: #11151c; --pass: #4ade80; --warn: #f5c451; --fail: #f97066; } }
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; } .soft { color: var(--soft); font-size: .9rem; }
.verdict { font-size: 1.6rem; margin: 1rem 0 .2rem; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; }
td, th { text-align: left; padding: .4rem .6rem; border-bottom: 1px solid var(--line);
  vertical-align: top; }
code { font-size: .9em; overflow-wrap: anywhere; } .pass { color: var(--pass); }
.warn { color: var(--warn); } .fail { color: var(--fail); font-weight: 600; }
.inconclusive { color: var(--warn); } .not { color: var(--soft); }
"""


def render_page(diagnosis: dict[str, Any]) -> str:
    """Render the HTML page of a diagnosis from the content of its doctor.json."""
    verdict, name = diagnosis["verdict"], escape_text(diagnosis["name"])
    because = "".join(f"<li>{escape_text(line)}</li>" for line in verdict["because"])
    codes = [f"<code>{escape_text(change)}</code>" for change in diagnosis["changes"]]
    changes = "".join(f"<li>{code}</li>" for code in codes)
    remarks = "".join(f"<li>{escape_text(remark)}</li>" for remark in diagnosis["remarks"])
    prompts, samples, seed = (diagnosis[name] for name in ("prompts", "samples", "seed"))
    sampled = f"{prompts} prompts, {samples} answers each, seed {seed}"
    body = (
        f'<h1>{name}</h1><p class="soft">before training: {sampled}</p>'
        f'<p class="verdict">{verdict["word"]}: {escape_text(verdict["meaning"])}</p><ul>{because}</ul>'
        f"<h2>SFT, OPD or RL?</h2><p>{escape_text(verdict['advice'])}</p>"
        f"{f'<h2>Changes</h2><ul>{changes}</ul>' if changes else ''}"
        f"<h2>Checks</h2>{_render_checks(diagnosis['checks'])}"
        f"{f'<h2>Said while loading</h2><ul>{remarks}</ul>' if remarks else ''}"
        "<p class=soft>Intervals are 95 %, by bootstrap over prompts. "
        "Limits that are proposed here have no published support.</p>"
    )
    return render_document(f"{name}: {verdict['word']}", STYLE, body)


def _render_checks(checks: list[dict[str, Any]]) -> str:
    head = "<tr><th></th><th>check</th><th>status</th><th>number</th><th>what it says</th></tr>"
    return f'<div class="scroll"><table>{head}{"".join(map(_render_row, checks))}</table></div>'


def _render_row(check: dict[str, Any]) -> str:
    fix = "".join(f"<br><code>{escape_text(change)}</code>" for change in check["fix"])
    needs = f"<br>needs about {check['needs']} answers" if check["needs"] else ""
    numbers = {name: number for name, number in check["details"].items() if number is not None}
    details = "; ".join(f"{escape_text(name)} {format_number(numbers[name])}" for name in numbers)
    return (
        f"<tr><td>{check['id']}</td><td>{escape_text(check['name'])}</td>"
        f'<td class="{check["status"].split()[0]}">{check["status"]}</td>'
        f"<td>{_format_value(check)}</td>"
        f"<td>{escape_text(check['sentence'])}{needs}{fix}"
        f'<div class="soft">{f"{details}<br>" if details else ""}'
        f"pass / warn / fail: {escape_text(check['limits'])} "
        f"({escape_text(check['limits_from'])})<br>{escape_text(check['anchor'])}</div></td></tr>"
    )


def _format_value(check: dict[str, Any]) -> str:
    """Format a check's number; nothing if it or a bound of its interval is missing."""
    interval = check["value"]
    if interval is None or None in interval.values():
        return ""
    return escape_text(format_interval(Interval(**interval), check["unit"]))
