"""Printed results of commands, and their notes."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any


def print_note(text: str) -> None:
    """Print to standard error, because standard output holds the result."""
    print(text, file=sys.stderr)


@contextmanager
def show_waiting() -> Iterator[None]:
    """Show notes and long waits on standard error, because standard output holds the result."""
    # Imported here: listing names or printing help must not wait for a library of texts.
    from practicum.runs.progress import open_console, show_progress

    with closing(open_console(stream=sys.stderr)) as console, show_progress(console):
        yield


def print_rows(rows: Sequence[Mapping[str, str]], as_json: bool) -> None:
    """Print names with their summaries, under a heading for each group; as JSON one object per line.

    Papers are in brackets, with a mark if the recipe is reduced, and the measured effect of the teacher
    if the recipe has a control; only the JSON has the methods.
    """
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    width = max((len(row["name"]) for row in rows), default=0)
    heading = ""
    for row in rows:
        if row.get("group", "") != heading:
            print(*([""] if heading else []), row["group"], sep="\n")
            heading = row["group"]
        effect = f"teacher: {row['teacher_effect']}" if row.get("teacher_effect") else ""
        notes = [row.get("paper", ""), "reduced" if row.get("reduced") else "", effect]
        notes_text = ", ".join(filter(None, notes))
        indent = "  " if heading else ""
        line = f"{indent}{row['name']:<{width}}  {row['summary']}"
        print((f"{line} ({notes_text})" if notes_text else line).rstrip())


def print_summary(summary: Mapping[str, Any], as_json: bool) -> None:
    """Print an evaluation, with calibration and domains last; as JSON one object."""
    if as_json:
        print(json.dumps(summary))
        return
    groups = {name: number for name, number in summary.items() if isinstance(number, dict)}
    numbers = {_spell_name(name): number for name, number in summary.items() if name not in groups}
    # An interval is also a mapping and counts as one number; each entry of any other mapping gets a
    # line.
    for name, group in groups.items():
        is_interval = "mean" in group
        numbers |= {_spell_name(name): group} if is_interval else _indent_names(name, group)
    width = max(map(len, numbers), default=0)
    for name, number in numbers.items():
        print(f"{name:{width}}  {_format_number(number)}".rstrip())


def _spell_name(name: str) -> str:
    """Return a name with spaces for underscores, except in a verifier's name in brackets."""
    metric, bracket, verifier = name.partition("[")
    return f"{metric.replace('_', ' ')}{bracket}{verifier}"


def _indent_names(title: str, group: Mapping[str, object]) -> dict[str, object]:
    """Return the title on a separate line, and each entry indented below; nothing if empty.

    The names of domains are not changed.
    """
    is_by_domain = title == "by_domain"
    entries = {
        f"  {name if is_by_domain else _spell_name(name)}": number for name, number in group.items()
    }
    return {_spell_name(title): "", **entries} if group else {}


def _format_number(number: object) -> str:
    if isinstance(number, dict) and {"mean", "low", "high"} <= set(number):
        return f"{number['mean']:.3f} [{number['low']:.3f}, {number['high']:.3f}]"
    if isinstance(number, dict):
        error = "" if number["se"] is None else f" ± {number['se']:.3f}"
        return f"{number['mean']:.3f}{error}"
    if number is None:
        return "unknown"
    return f"{number:.4g}" if isinstance(number, float) else str(number)
