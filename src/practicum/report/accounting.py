"""What was dropped and why, with counts that add up, and what fired, what was foretold, and how to do it again."""

import json
from collections import Counter
from collections.abc import Sequence

from practicum.report.markup import (
    Section,
    bar,
    count,
    note,
    panel,
    percent,
    render_details,
    safe,
    table,
)
from practicum.report.reading import Row, RunData
from practicum.report.verdict import signed, tokens_sampled
from practicum.statistics import Interval, contains_zero

MOST_REASONS = 8

FIRST_ALARMS, MOST_ALARMS = 20, 500
"""So many alarms are listed at once, and so many at all."""

Part = tuple[str, float | int]
"""Why something was kept or dropped, and how much of it."""

EXPECTED = {
    "GO": True,
    "GO-WITH-CHANGES": True,
    "NO-GAP": False,
    "NO-GO": False,
    "BROKEN-SETUP": False,
}
"""Whether a gain was foretold, by the doctor's verdict; the others foretell nothing."""


def dropped_section(run: RunData) -> Section | None:
    """Rows, tokens and updates, each split by what became of it."""
    wholes = [
        ("Rows of the data", _rows(run)),
        ("Tokens of the rollouts", _tokens(run)),
        ("Updates", _updates(run)),
    ]
    body = "".join(
        _whole(title, parts) for title, parts in wholes if sum(amount for _, amount in parts) > 0
    )
    if not body:
        return None
    groups = sum(row.get("unsupervised_prompts") or 0.0 for row in run.metrics)
    silent = (
        note(
            f"{count(groups)} times a step had a prompt of whose completions no token was learned from."
        )
        if groups
        else ""
    )
    return Section(
        "dropped",
        "Dropped",
        "What was dropped, and why",
        "",
        f'<div class="panels">{body}</div>{silent}',
    )


def _whole(title: str, parts: Sequence[Part]) -> str:
    total = sum(amount for _, amount in parts)
    body = [
        [name, count(amount), percent(amount / total), bar(amount / total)]
        for name, amount in parts
    ]
    body.append(["<b>together</b>", f"<b>{count(total)}</b>", "<b>100 %</b>", ""])
    return panel(title, table(["", "count", "share", ""], body, numbers=(1, 2), label=title))


def _rows(run: RunData) -> list[Part]:
    """The rows of the training data: used as prompts, too long for the recipe, or rejected, by reason."""
    if run.prompts is None:
        return []
    heldout = str(run.recipe.get("task", {}).get("heldout") or "")
    rejected = Counter(
        _reason(row)
        for row in run.rejected
        if not heldout or not str(row.get("file", "")).endswith(heldout)
    )
    common = rejected.most_common(MOST_REASONS)
    rest = rejected.total() - sum(amount for _, amount in common)
    parts = [
        ("used as training prompts", float(run.prompts["used"])),
        ("too long", float(run.prompts["too_long"])),
    ]
    parts += [(f"rejected: {safe(reason)}", float(amount)) for reason, amount in common]
    return parts + ([("rejected for other reasons", float(rest))] if rest else [])


def _reason(row: Row) -> str:
    """A rejected row's reason without what is its own: the text after the first quotation mark."""
    return str(row.get("reason", "no reason given")).partition("'")[0].strip().rstrip(":")[:80]


def _tokens(run: RunData) -> list[Part]:
    """Split the tokens of all completions: learned from, in skipped updates, left out by the objective, or masked."""
    _, sampled = tokens_sampled(run.metrics)
    skipped = sum(row["tokens"] for row in run.metrics if _skipped(row))
    unmasked = sum(row["tokens"] for row in run.metrics) - skipped
    learned = sum(_supervised(row) for row in run.metrics if not _skipped(row))
    return [
        ("learned from", learned),
        ("in updates that were skipped", skipped),
        ("left out by filters, weights or advantages", unmasked - learned),
        ("masked: not learned from", max(round(sampled) - unmasked - skipped, 0.0)),
    ]


def _skipped(row: Row) -> bool:
    return bool(row.get("skipped") or row.get("nonfinite"))


def _supervised(row: Row) -> float:
    """Return how many tokens the loss of a step counted; runs from before this was written down counted all."""
    return row.get("supervised", row["tokens"])


def _updates(run: RunData) -> list[Part]:
    skipped = sum(_skipped(row) for row in run.metrics)
    empty = sum(_supervised(row) == 0 and not _skipped(row) for row in run.metrics)
    return [
        ("steps taken", float(len(run.metrics) - skipped - empty)),
        ("steps skipped: loss or gradient not finite", float(skipped)),
        ("steps skipped: no token to learn from", float(empty)),
    ]


def alarms_section(run: RunData) -> Section | None:
    """What the monitors said, and what they would change."""
    if not run.alarms:
        return None
    body = [_alarm(alarm) for alarm in run.alarms]
    head = ["step", "monitor", "", "value", "baseline", "rule", "action", "to try"]
    whole = table(head, body, numbers=(3, 4), label="alarms", first=FIRST_ALARMS, most=MOST_ALARMS)
    about = f"{count(len(body))} in {count(len(run.metrics))} steps: {_most_frequent(run.alarms)}"
    return Section("alarms", "Alarms", "Alarms", about, whole)


def _most_frequent(alarms: Sequence[Row]) -> str:
    names = Counter(str(alarm.get("name", alarm.get("id", ""))) for alarm in alarms)
    return ", ".join(f"{safe(name)} {count(times)}" for name, times in names.most_common(5))


def _alarm(alarm: Row) -> list[str]:
    """The cells of one alarm."""
    return [
        str(int(alarm["step"])),
        safe(str(alarm.get("id", ""))),
        safe(str(alarm.get("name", ""))),
        _value(alarm.get("value")),
        _value(alarm.get("baseline")),
        safe(str(alarm.get("rule") or "")),
        safe(str(alarm.get("action") or "")),
        _patch(alarm),
    ]


def _value(value: object) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, int | float)
        else ""
        if value is None
        else safe(str(value))
    )


def _patch(alarm: Row) -> str:
    """The changes that an alarm proposes, and those that the recipe let it make."""
    patch, made = alarm.get("patch"), alarm.get("set")
    proposed = patch if isinstance(patch, list) else [patch] if patch else []
    lines = [
        f"<code>{safe(one if isinstance(one, str) else json.dumps(one))}</code>" for one in proposed
    ]
    lines += (
        [f"<code>{safe(str(key))}={_value(value)}</code> (set)" for key, value in made.items()]
        if made
        else []
    )
    return "<br>".join(lines)


def doctor_section(run: RunData) -> Section | None:
    """What the doctor foretold, beside what came of it."""
    if run.doctor is None:
        return None
    said, reasons = _describe_prediction(run.doctor)
    body = [
        [
            safe(str(check.get("name", check.get("id", "")))),
            f'<span class="status {_status(check)}">{safe(str(check.get("status", "")))}</span>',
            _measured(check),
            safe(str(check.get("sentence") or "")),
            safe(str(check.get("anchor") or "")),
            _lines(check.get("fix")),
        ]
        for check in run.doctor.get("checks", ())
    ]
    checks = table(
        ["check", "status", "value", "", "anchor", "fix"],
        body,
        numbers=(2,),
        label="the doctor's checks",
    )
    top = (
        f'<p class="foretold"><b>{safe(said)}</b> was foretold{reasons}. {_outcome(said, run)}</p>'
    )
    return Section(
        "doctor",
        "Doctor",
        "Foretold and come true",
        "the doctor's verdict before the run",
        top + checks,
    )


def _describe_prediction(doctor: Row) -> tuple[str, str]:
    """The verdict's word, and its meaning as the end of a sentence."""
    verdict = doctor.get("verdict", "")
    if not isinstance(verdict, dict):
        return str(verdict), ""
    return str(verdict.get("word", "")), f" ({safe(str(verdict.get('meaning', '')))})"


def _lines(value: object) -> str:
    """One line of code for each override."""
    return "<br>".join(
        f"<code>{safe(str(one))}</code>"
        for one in (value if isinstance(value, list) else [value])
        if one
    )


def _status(check: Row) -> str:
    status = str(check.get("status", "")).lower()
    return status if status in ("pass", "warn", "fail") else ""


def _measured(check: Row) -> str:
    """A check's value with its interval, as one object or as three fields."""
    value = check.get("value")
    known = (
        value
        if isinstance(value, dict)
        else {"mean": value, "low": check.get("low"), "high": check.get("high")}
    )
    mean, low, high = (known.get(name) for name in ("mean", "low", "high"))
    return (
        _value(mean)
        if low is None or high is None
        else f"{_value(mean)} [{_value(low)}, {_value(high)}]"
    )


def _outcome(said: str, run: RunData) -> str:
    won = None if run.summary is None else run.summary["gain"]
    if won is None:
        return (
            "The outcome is not known yet." if run.summary is None else "The run measured no gain."
        )
    gain = Interval(**won)
    better = gain.mean > 0 and not contains_zero(gain)
    what = f"The run gained {signed(gain.mean)} [{signed(gain.low)}, {signed(gain.high)}]"
    expected = EXPECTED.get(said)
    if expected is None:
        return f"{what}; this verdict foretold neither a gain nor none."
    return f"{what}: the verdict {'held' if better == expected else 'did not hold'}."


def reproduce_section(run: RunData) -> Section:
    """What it takes to do the run again: seed, versions, digests, the starts, and the whole recipe."""
    facts: list[tuple[str, object]] = [
        ("seed", run.seed),
        ("threads", run.recipe["train"].get("threads") or "not fixed"),
    ]
    facts += [(name, value) for name, value in (run.versions or {}).items() if name != "threads"]
    facts += [("threads in use", run.versions["threads"])] if run.versions else []
    facts += list(run.identity.items())
    starts = ", ".join(str(start["first"]) for start in run.starts)
    resumed = f"{len(run.starts)} ({'at step ' + starts})" if run.starts else "not recorded"
    facts.append(("starts and resumes", resumed))
    facts += [
        (f"changed from step {change['step']} on", _changed(change)) for change in run.changes
    ]
    body = [[safe(str(name)), f"<code>{safe(str(value))}</code>"] for name, value in facts]
    settings = safe(json.dumps(run.recipe, indent=2, ensure_ascii=False), lines=True)
    changed = _changed_versions(run)
    whole = table(["", ""], body, label="reproducibility")
    recipe = render_details("every setting of the recipe", f'<pre tabindex="0">{settings}</pre>')
    return Section(
        "again",
        "Recipe",
        "To do it again",
        "one seed, these versions, this recipe",
        whole + changed + recipe,
    )


def _changed(change: Row) -> str:
    """A field of the recipe that was let change, and both values."""
    before, after = (json.dumps(change[when], ensure_ascii=False) for when in ("before", "after"))
    return f"{change['field']}: {before} before, {after} after"


def _changed_versions(run: RunData) -> str:
    """What changed between the starts of the run."""
    names = sorted({name for start in run.starts for name in start["versions"]})
    moved = [
        name
        for name in names
        if len({str(start["versions"].get(name)) for start in run.starts}) > 1
    ]
    if not moved:
        return ""
    return note(
        f"Changed between the starts: {safe(', '.join(moved))}; bit-exactness is not promised."
    )
