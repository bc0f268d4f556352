"""The report: one self-contained HTML page with the gain, the curves, and the answers before and after."""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from practicum.costs import Spending
from practicum.diagnosis.tables import cost_lines
from practicum.recipe import parse_recipe
from practicum.run_dir import read_rows, write_text
from practicum.text import printable

WIDTH, HEIGHT, MARGIN = 380, 150, 44

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #667085; --line: #d5dae3; --paper: #ffffff; --accent: #2f6fde;
  --good: #17803d; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #98a2b3; --line: #344054; --paper: #11151c;
  --accent: #7ab0ff; --good: #4ade80; --bad: #f97066; } }
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; } .about { color: var(--soft); margin-top: .2rem; } .gain { font-size: 1.4rem; margin: 1.2rem 0; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; } td, th { text-align: left; padding: .35rem .6rem;
  border-bottom: 1px solid var(--line); vertical-align: top; } .scroll { overflow-x: auto; }
figure { margin: 0; } figcaption { color: var(--soft); } .charts { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); } svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; } .axis { stroke: var(--line); }
.curve { fill: none; stroke: var(--accent); stroke-width: 2; } .dot { fill: var(--accent); }
.right { color: var(--good); } .wrong { color: var(--bad); }
"""

CURVES = {
    "reverse_kl": "reverse KL to the teacher, nats a token",
    "reward": "share of right answers while training",
    "length": "tokens an answer",
    "student_entropy": "student entropy, nats a token",
    "truncated": "share of answers cut off",
    "grad_norm": "gradient norm before clipping",
}


def write_report(run: Path) -> Path:
    """Write `report.html` into a run folder from its summary and metrics; returns its path."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    recipe = json.loads((run / "recipe.json").read_text(encoding="utf-8"))["recipe"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timings = run / "timings.jsonl"
    spent = Spending()
    for row in read_rows(timings) if timings.is_file() else ():
        spent.add(row)
    lines = cost_lines(summary, parse_recipe(recipe, "recipe.json"), spent.seconds) if "cost" in summary else {}
    cost = "".join(f"<p>{safe(name)}: {safe(line)}</p>" for name, line in lines.items())
    path = run / "report.html"
    write_text(path, _page(summary, recipe, rows, cost))
    return path


def _page(summary: dict[str, Any], recipe: dict[str, Any], rows: Sequence[dict[str, Any]], cost: str) -> str:
    title = safe(summary["name"])
    charts = "".join(
        _chart(rows, name, caption) for name, caption in CURVES.items() if any(name in row for row in rows)
    )
    settings = safe(json.dumps(recipe, indent=2, ensure_ascii=False), lines=True)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f'<h1>{title}</h1><p class="about">{safe(recipe["about"])}</p>{_gain(summary)}{cost}{_comparison(summary)}'
        f'<h2>While training</h2><div class="charts">{charts}</div>{_answers(summary["samples"])}'
        f"<h2>Recipe</h2><details><summary>every setting</summary><pre>{settings}</pre></details></body></html>\n"
    )


def _gain(summary: dict[str, Any]) -> str:
    won = summary["gain"]
    cost = f"{summary['steps']} steps, {summary['rollouts']} rollouts, {summary['tokens']} tokens learned from"
    if won is None:
        return f'<p class="gain">{cost}</p>'
    return (
        f'<p class="gain">Accuracy {won["mean"]:+.2f} (95 % interval {won["low"]:+.2f} to {won["high"]:+.2f}, paired by prompt), '
        f"from {cost}.</p>"
    )


def _comparison(summary: dict[str, Any]) -> str:
    columns = [(name, summary[key]) for name, key in (("before", "before"), ("after", "after"), ("teacher", "teacher"))]
    columns = [(name, column) for name, column in columns if column is not None]
    if not columns:
        return ""
    labels = {
        "accuracy": "accuracy",
        "reverse_kl": "reverse KL / token",
        "student_entropy": "entropy / token",
        "length": "tokens / answer",
        "truncated": "cut off",
    }
    head = "".join(f"<th>{name}</th>" for name, _ in columns)
    body = "".join(
        f"<tr><th>{label}</th>{''.join(f'<td>{number(column[key])}</td>' for _, column in columns)}</tr>"
        for key, label in labels.items()
    )
    return f'<h2>Held-out evaluation</h2><div class="scroll"><table><tr><th></th>{head}</tr>{body}</table></div>'


def number(value: Any) -> str:
    """Three digits, or a mean with its interval; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
    return f"{value:.3g}"


def _answers(samples: Sequence[dict[str, Any]]) -> str:
    if not samples:
        return ""
    rows = "".join(
        f"<tr><td>{safe(sample['prompt'])}</td><td>{safe(sample['answer'] or '')}</td>"
        f"<td{_mark(sample['reward_before'])}>{safe(sample['before'])}</td>"
        f"<td{_mark(sample['reward_after'])}>{safe(sample['after'])}</td></tr>"
        for sample in samples
    )
    head = "<tr><th>prompt</th><th>expected</th><th>before</th><th>after</th></tr>"
    return f'<h2>Answers</h2><div class="scroll"><table>{head}{rows}</table></div>'


def _mark(reward: float | None) -> str:
    return "" if reward is None else f' class="{"right" if reward >= 1.0 else "wrong"}"'


def _chart(rows: Sequence[dict[str, Any]], name: str, caption: str) -> str:
    points = [(float(row["step"]), float(row[name])) for row in rows if row.get(name) is not None]
    if not points:
        return ""
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    top = max(value for _, value in points) or 1.0

    def place(step: float, value: float) -> tuple[float, float]:
        x = MARGIN + (step - first) / (last - first) * (WIDTH - 2 * MARGIN)
        return x, HEIGHT - 24 - max(value, 0.0) / top * (HEIGHT - 48)

    places = [place(*point) for point in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dots = "".join(
        f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>step {step:.0f}: {value:.4g}</title></circle>'
        for (x, y), (step, value) in zip(places, points, strict=True)
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(caption)}">'
        f'<line class="axis" x1="{MARGIN}" y1="{HEIGHT - 24}" x2="{WIDTH - MARGIN}" y2="{HEIGHT - 24}"/>'
        f'<text x="4" y="28">{top:.3g}</text><text x="4" y="{HEIGHT - 20}">0</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 6}">step {first:.0f}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 6}" text-anchor="end">{points[-1][0]:.0f}</text>'
        f'<polyline class="curve" points="{line}"/>{dots}</svg><figcaption>{html.escape(caption)}</figcaption></figure>'
    )


def safe(text: str, *, lines: bool = False) -> str:
    """Text of users and models: control and direction characters made visible, markup made plain."""
    shown = "\n".join(printable(line) for line in text.splitlines()) if lines else printable(text)
    return html.escape(shown)
