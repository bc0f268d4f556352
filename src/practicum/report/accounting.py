"""The accounts of a run: what was dropped, alarms, the doctor's prediction, and the recipe."""

import json
from collections import Counter
from collections.abc import Sequence

from practicum.report.markup import (
    Section,
    escape_text,
    format_count,
    format_percent,
    render_bar,
    render_details,
    render_note,
    render_panels,
    render_table,
)
from practicum.report.outcome_verdict import read_gain
from practicum.report.run_data import Row, RunData
from practicum.report.verdict import count_tokens, format_signed
from practicum.statistics import Interval

MAX_REASONS = 8

MAX_OPEN_ALARMS, MAX_ALARMS = 20, 500
"""The number of alarms listed at first, and the largest number listed."""

Part = tuple[str, float | int]
"""A reason why something was kept or dropped, and its amount."""

GAIN_EXPECTED, NO_GAIN_EXPECTED = (
    ("GO",),
    ("NO-GAP", "NO-GO", "BROKEN-SETUP"),
)
"""The verdicts of the doctor that predict a gain, and the verdicts that predict no gain. Other
verdicts predict nothing."""


def build_dropped_section(run: RunData) -> Section | None:
    """Build the section that splits rows, tokens and updates by outcome."""
    accounts = {
        "Rows of the data": _split_rows(run),
        "Tokens of the rollouts": _split_tokens(run),
        "Updates": _split_updates(run),
    }
    tables = {title: _render_parts(title, parts) for title, parts in accounts.items()}
    if not any(tables.values()):
        return None
    body = render_panels(tables)
    groups = sum(row.get("unsupervised_prompts") or 0.0 for row in run.metrics)
    if groups:
        body += render_note(
            f"{format_count(groups)} times, a prompt of a step had no completion with "
            "a supervised token."
        )
    return Section("dropped", "Dropped", "What was dropped, and why", "", body)


def _render_parts(title: str, parts: Sequence[Part]) -> str:
    total = sum(amount for _, amount in parts)
    if total <= 0:
        return ""
    body = []
    for name, amount in parts:
        share = amount / total
        body.append([name, format_count(amount), format_percent(share), render_bar(share)])
    body.append(["<b>together</b>", f"<b>{format_count(total)}</b>", "<b>100 %</b>", ""])
    return render_table(["", "count", "share", ""], body, numbers=(1, 2), label=title)


def _split_rows(run: RunData) -> list[Part]:
    """Split the training data: used as prompts, too long for the recipe, or rejected, by reason."""
    if run.prompts is None:
        return []
    # Rejected rows of the held-out file are not training data, so they are not counted here.
    heldout = str(run.recipe.get("task", {}).get("heldout") or "")
    rejected = Counter(
        _read_reason(row)
        for row in run.rejected
        if not heldout or not str(row.get("file", "")).endswith(heldout)
    )
    common = rejected.most_common(MAX_REASONS)
    uncommon = rejected.total() - sum(amount for _, amount in common)
    parts = [
        ("used as training prompts", float(run.prompts["used"])),
        ("too long", float(run.prompts["too_long"])),
    ]
    parts += [(f"rejected: {escape_text(reason)}", float(amount)) for reason, amount in common]
    return parts + ([("rejected for other reasons", float(uncommon))] if uncommon else [])


def _read_reason(row: Row) -> str:
    """Return a rejected row's reason up to the first quotation mark, where its own text begins."""
    return str(row.get("reason", "no reason given")).partition("'")[0].strip().rstrip(":")[:80]


def _split_tokens(run: RunData) -> list[Part]:
    """Split the tokens of all completions: supervised, skipped, left out, or masked."""
    # A row holds the mean length, so the total is a sum of products and only nearly whole.
    _, total = count_tokens(run.metrics)
    skipped = sum(row["tokens"] for row in run.metrics if _is_skipped(row))
    unmasked = sum(row["tokens"] for row in run.metrics) - skipped
    supervised = sum(_count_supervised(row) for row in run.metrics if not _is_skipped(row))
    return [
        ("supervised", supervised),
        ("in updates that were skipped", skipped),
        ("left out by filters, weights or advantages", unmasked - supervised),
        ("masked: not supervised", max(round(total) - unmasked - skipped, 0.0)),
    ]


def _is_skipped(row: Row) -> bool:
    return bool(row.get("skipped") or row.get("nonfinite"))


def _count_supervised(row: Row) -> float:
    """Return the number of tokens in a step's loss; without this reading, all tokens of the step."""
    return row.get("supervised", row["tokens"])


def _split_updates(run: RunData) -> list[Part]:
    skipped = sum(_is_skipped(row) for row in run.metrics)
    empty = sum(_count_supervised(row) == 0 and not _is_skipped(row) for row in run.metrics)
    return [
        ("steps taken", float(len(run.metrics) - skipped - empty)),
        ("steps skipped: loss or gradient not finite", float(skipped)),
        ("steps skipped: no token to learn from", float(empty)),
    ]


def build_alarms_section(run: RunData) -> Section | None:
    """Build the section of alarms and the changes that they propose."""
    if not run.alarms:
        return None
    table = render_table(
        ["step", "monitor", "", "value", "baseline", "rule", "action", "to try"],
        [_render_alarm(alarm) for alarm in run.alarms],
        numbers=(3, 4),
        label="alarms",
        max_open=MAX_OPEN_ALARMS,
        max_rows=MAX_ALARMS,
    )
    names = Counter(str(alarm.get("name", alarm.get("id", ""))) for alarm in run.alarms)
    common = ", ".join(
        f"{escape_text(name)} {format_count(times)}" for name, times in names.most_common(5)
    )
    steps = format_count(len(run.metrics))
    about = f"{format_count(len(run.alarms))} in {steps} steps: {common}"
    return Section("alarms", "Alarms", "Alarms", about, table)


def _render_alarm(alarm: Row) -> list[str]:
    """Render the cells of an alarm."""
    monitor, rule = _escape_fields(alarm, "id", "name"), _escape_fields(alarm, "rule", "action")
    values = [_render_value(alarm.get(key)) for key in ("value", "baseline")]
    return [str(int(alarm["step"])), *monitor, *values, *rule, _render_patch(alarm)]


def _escape_fields(row: Row, *keys: str) -> list[str]:
    """Escape the texts of these fields; a missing field becomes an empty text."""
    return [escape_text(str(row.get(key) or "")) for key in keys]


def _render_value(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, int | float) else escape_text(str(value))


def _render_patch(alarm: Row) -> str:
    """Render the changes that an alarm proposes, and the changes that the recipe let it make."""
    patch = alarm.get("patch")
    overrides = patch if isinstance(patch, list) else [patch] if patch else []
    lines = [
        f"<code>{escape_text(text if isinstance(text, str) else json.dumps(text))}</code>"
        for text in overrides
    ]
    lines += [
        f"<code>{escape_text(str(key))}={_render_value(value)}</code> (set)"
        for key, value in (alarm.get("set") or {}).items()
    ]
    return "<br>".join(lines)


def build_doctor_section(run: RunData) -> Section | None:
    """Build the section that compares the doctor's prediction with the outcome."""
    if run.doctor is None:
        return None
    verdict = run.doctor.get("verdict", "")
    word, meaning = str(verdict), ""
    if isinstance(verdict, dict):
        word = str(verdict.get("word", ""))
        meaning = f" ({escape_text(str(verdict.get('meaning', '')))})"
    checks = render_table(
        ["check", "status", "value", "", "anchor", "fix"],
        [_render_check(check) for check in run.doctor.get("checks", ())],
        numbers=(2,),
        label="the doctor's checks",
    )
    forecast = (
        f'<p class="foretold"><b>{escape_text(word)}</b> was predicted{meaning}. '
        f"{_describe_outcome(word, run)}</p>"
    )
    about = "the doctor's verdict before the run"
    return Section("doctor", "Doctor", "Prediction and outcome", about, forecast + checks)


def _render_check(check: Row) -> list[str]:
    """Render the cells of one of the doctor's checks."""
    status = str(check.get("status", ""))
    kind = status.lower() if status.lower() in ("pass", "warn", "fail") else ""
    fix = check.get("fix")
    fixes = fix if isinstance(fix, list) else [fix]
    return [
        escape_text(str(check.get("name", check.get("id", "")))),
        f'<span class="status {kind}">{escape_text(status)}</span>',
        _render_measurement(check),
        *_escape_fields(check, "sentence", "anchor"),
        "<br>".join(f"<code>{escape_text(str(override))}</code>" for override in fixes if override),
    ]


def _render_measurement(check: Row) -> str:
    """Render a check's value with its interval, which is one object or three fields."""
    value = check.get("value")
    fields = value if isinstance(value, dict) else {**check, "mean": value}
    mean, low, high = (fields.get(name) for name in ("mean", "low", "high"))
    if low is None or high is None:
        return _render_value(mean)
    return f"{_render_value(mean)} [{_render_value(low)}, {_render_value(high)}]"


def _describe_outcome(word: str, run: RunData) -> str:
    if run.summary is None:
        return "The outcome is not known yet."
    _, numbers = read_gain(run.summary)
    if numbers is None:
        return "The run measured no gain."
    gain = Interval(**numbers)
    if run.summary["verdict"]["verdict"] == "TOO FEW PROMPTS":
        return f"The run gained {format_signed(gain.mean)} on too few prompts to judge the verdict."
    ends = f"[{format_signed(gain.low)}, {format_signed(gain.high)}]"
    outcome = f"The run gained {format_signed(gain.mean)} {ends}"
    if word not in (*GAIN_EXPECTED, *NO_GAIN_EXPECTED):
        return f"{outcome}; this verdict predicts neither a gain nor its absence."
    has_held = (gain.low > 0) == (word in GAIN_EXPECTED)
    return f"{outcome}: the verdict {'held' if has_held else 'did not hold'}."


def build_reproduce_section(run: RunData) -> Section:
    """Build the section with seed, versions, digests, starts and the whole recipe."""
    facts: list[tuple[str, object]] = [
        ("seed", run.seed),
        ("threads", run.recipe["train"].get("threads") or "not fixed"),
    ]
    facts += [
        (name, version) for name, version in (run.versions or {}).items() if name != "threads"
    ]
    facts += [("threads in use", run.versions["threads"])] if run.versions else []
    facts += list(run.identity.items())
    starts = ", ".join(str(start["first"]) for start in run.starts)
    resumed = f"{len(run.starts)} ({'at step ' + starts})" if run.starts else "not recorded"
    facts.append(("starts and resumes", resumed))
    facts += [
        (f"changed from step {change['step']} on", _describe_change(change))
        for change in run.changes
    ]
    rows = [
        [escape_text(str(name)), f"<code>{escape_text(str(fact))}</code>"] for name, fact in facts
    ]
    settings = escape_text(json.dumps(run.recipe, indent=2, ensure_ascii=False), lines=True)
    recipe = render_details("every setting of the recipe", f'<pre tabindex="0">{settings}</pre>')
    table = render_table(["", ""], rows, label="reproducibility")
    body = table + _render_changed_versions(run) + recipe
    about = "one seed, these versions, this recipe"
    return Section("again", "Recipe", "Reproduce this run", about, body)


def _describe_change(change: Row) -> str:
    """Describe an allowed change of a recipe's field, with both values."""
    before, after = (json.dumps(change[when], ensure_ascii=False) for when in ("before", "after"))
    return f"{change['field']}: {before} before, {after} after"


def _render_changed_versions(run: RunData) -> str:
    """Render a note on the versions that differ between the starts of the run."""
    versions = [start["versions"] for start in run.starts]
    names = sorted({name for row in versions for name in row})
    changed = [name for name in names if len({str(row.get(name)) for row in versions}) > 1]
    if not changed:
        return ""
    return render_note(
        f"Changed between the starts: {escape_text(', '.join(changed))}; bit-exactness is not promised."
    )
