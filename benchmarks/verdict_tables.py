"""Summarise the setups of `benchmarks.verdicts`: how the doctor's verdict and the monitors tell broken setups from healthy ones."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import render_table
from practicum import run_dir
from practicum.monitors import MONITORS
from practicum.statistics import Interval, auroc, wilson
from practicum.studies.doctor.checks import CHECKS

ROWS = Path(__file__).resolve().parents[1] / "results" / "verdicts.jsonl"

SMALLEST_LOSS = 0.1
"""A run that ends less than this below its twin is not harmed by its fault."""

ROUND, TUNING = 19, range(15)
"""Setups per round, which has each fault once, and the rounds that were used to choose thresholds."""

NEWEST = 20
"""The first round that ran after the newest monitor, M41, was added."""

Row = Mapping[str, Any]


def read_rows(path: Path = ROWS) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file; none if there is no file."""
    return list(run_dir.read_rows(path)) if path.is_file() else []


def mark_rows(rows: Sequence[Row]) -> list[tuple[Row, bool]]:
    """Return each row with True if its setup is broken; rows of harmless faults are left out.

    A fault breaks a setup if it is in the measurement, if it ends the run, or if the run loses half of its twin's gain
    and `SMALLEST_LOSS` of accuracy or more.
    """
    twins = {(row["models"], row["number"]): row["gain"] for row in rows if not row["fault"]}
    labelled = []
    for row in rows:
        if not row["fault"]:
            labelled.append((row, False))
            continue
        twin, gain = twins[row["models"], row["number"]], row["gain"]
        least = max(SMALLEST_LOSS, twin / 2)
        if row["measures"] or gain is None or twin - gain >= least:
            labelled.append((row, True))
    return labelled


def is_report(row: Row) -> bool:
    """Return True if a row was not used to choose thresholds."""
    return row["models"] != "toy" or row["number"] // ROUND not in TUNING


def rate_suspicion(row: Row) -> float:
    """Return a number that grows with the doctor's doubts: a verdict against the run, then failures, then warnings."""
    statuses = [status for status, _ in row["checks"].values()]
    return 100.0 * (row["exit_code"] != 0) + statuses.count("fail") + 0.1 * statuses.count("warn")


def render_verdicts(rows: Sequence[Row] | None = None) -> str:
    """Render the discrimination of the verdict in each half."""
    labelled = mark_rows(read_rows() if rows is None else rows)
    groups: dict[str, Callable[[Row], bool]] = {
        "toys, used to choose thresholds": lambda row: (
            row["models"] == "toy" and not is_report(row)
        ),
        "toys, not used": lambda row: row["models"] == "toy" and is_report(row),
        "the 135M model, not used": lambda row: row["models"] != "toy",
    }
    table = []
    for name, belongs in groups.items():
        chosen = [(row, broken) for row, broken in labelled if belongs(row)]
        if not chosen:
            continue
        broken_rows = [row for row, broken in chosen if broken]
        healthy_rows = [row for row, broken in chosen if not broken]
        area = auroc([rate_suspicion(row) for row, _ in chosen], [broken for _, broken in chosen])
        table.append(
            [
                name,
                f"{len(broken_rows)}, {len(healthy_rows)}",
                "" if area is None else _format(area),
                _format_share(broken_rows, _is_stopped),
                _format_share(healthy_rows, _is_stopped),
                _format_share(healthy_rows, lambda row: row["verdict"] == "GO"),
            ]
        )
    head = [
        "setups",
        "broken, healthy",
        "AUROC",
        "broken with an exit code",
        "healthy with one",
        "healthy: GO",
    ]
    return render_table(head, table)


def render_faults(rows: Sequence[Row] | None = None) -> str:
    """Render how often each fault does harm, and the doctor's verdicts on it."""
    rows = read_rows() if rows is None else rows
    broken = {row["name"] for row, is_broken in mark_rows(rows) if is_broken}
    table = []
    for fault in dict.fromkeys(row["fault"] for row in rows if row["fault"]):
        setups = [row for row in rows if row["fault"] == fault]
        harmed = [row for row in setups if row["name"] in broken]
        words = dict.fromkeys(row["verdict"] for row in harmed)
        counts = [f"{word} {sum(row['verdict'] == word for row in harmed)}" for word in words]
        stopped = sum(_is_stopped(row) for row in harmed)
        table.append(
            [
                fault,
                f"{len(harmed)}/{len(setups)}",
                f"{stopped}/{len(harmed)}",
                ", ".join(counts),
            ]
        )
    return render_table(["fault", "harmful", "with an exit code", "verdicts"], table)


def render_checks(rows: Sequence[Row] | None = None) -> str:
    """Render how often each check fails or warns among broken and healthy setups of the report."""
    labelled = mark_rows(read_rows() if rows is None else rows)
    chosen = [(row, broken) for row, broken in labelled if is_report(row) and row["checks"]]
    table = []
    for check in CHECKS:
        cells = []
        for status in ("fail", "warn"):
            for group in (True, False):
                members = [
                    row for row, broken in chosen if broken == group and check.id in row["checks"]
                ]
                count = sum(row["checks"][check.id][0] == status for row in members)
                cells.append(f"{count}/{len(members)}")
        if any(not cell.startswith("0/") for cell in cells):
            table.append([f"{check.id} {check.name}", *cells])
    return render_table(["check", "fails: broken", "healthy", "warns: broken", "healthy"], table)


def split_runs(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return the bad and the good runs: broken ones with a fault outside the measurement, and healthy ones that gained."""
    ran = [(row, broken) for row, broken in mark_rows(rows) if row["alarms"] is not None]
    bad = [row for row, broken in ran if broken and not row["measures"]]
    good = [row for row, broken in ran if not broken and row["gain"] >= SMALLEST_LOSS]
    return bad, good


def render_alarms(rows: Sequence[Row] | None = None) -> str:
    """Render how often any monitor, and each in the report, raises an alarm in bad and in good runs."""
    rows = read_rows() if rows is None else rows
    tuned = split_runs([row for row in rows if not is_report(row)])
    bad, good = split_runs([row for row in rows if is_report(row)])
    toys, real = (
        [[row for row in group if row["models"] == models] for group in (bad, good)]
        for models in ("toy", "smollm2")
    )
    newest = [[row for row in group if row["number"] // ROUND >= NEWEST] for group in toys]
    table = [
        [title, *(_format_share(group, lambda row: bool(row["alarms"])) for group in groups)]
        for title, groups in (
            ("any, toys used to choose thresholds", tuned),
            ("any, other toys", toys),
            ("any, toys that ran after the newest monitor was added", newest),
            ("any, the 135M model", real),
        )
    ]
    without = (_format_share(group, lambda row: bool({*row["alarms"]} - {"M41"})) for group in toys)
    table.insert(3, ["any but M41, other toys", *without])
    for name, monitor in MONITORS.items():
        counts = [sum(name in row["alarms"] for row in group) for group in (bad, good)]
        if any(counts):
            shares = (
                f"{count}/{len(group)}" for count, group in zip(counts, (bad, good), strict=True)
            )
            table.append([f"{name} {monitor.name}", *shares])
    return render_table(["monitor", "bad runs with an alarm", "good runs with an alarm"], table)


def _is_stopped(row: Row) -> bool:
    return row["exit_code"] != 0


def _format_share(rows: Sequence[Row], holds: Callable[[Row], bool]) -> str:
    count = sum(holds(row) for row in rows)
    return f"{count} of {len(rows)}: {_format(wilson(count, len(rows)))}" if rows else ""


def _format(interval: Interval) -> str:
    return f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
