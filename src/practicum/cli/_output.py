"""Printed results of commands, and notes beside them."""

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
    from practicum.runs.console import open_console, show_progress

    with closing(open_console(stream=sys.stderr)) as console, show_progress(console):
        yield


def print_rows(rows: Sequence[Mapping[str, str]], as_json: bool) -> None:
    """Print names with their summaries, papers and methods; as JSON one object per line."""
    if as_json:
        for row in rows:
            print(json.dumps(row))
        return
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        paper = f" ({row['paper']})" if row.get("paper") else ""
        print(f"{row['name']:<{width}}  {row['summary']}{paper}".rstrip())
        if row.get("method"):
            print(f"{'':<{width}}  {row['method']}")


def print_summary(summary: Mapping[str, Any], as_json: bool) -> None:
    """Print an evaluation, the domains last; as JSON one object."""
    if as_json:
        print(json.dumps(summary))
        return
    numbers = {name: number for name, number in summary.items() if name != "by_domain"}
    numbers |= {f"  {domain}": interval for domain, interval in summary["by_domain"].items()}
    for name, number in numbers.items():
        print(f"{name:16} {_format_number(number)}")


def _format_number(number: object) -> str:
    if isinstance(number, dict) and {"mean", "low", "high"} <= set(number):
        return f"{number['mean']:.3f} [{number['low']:.3f}, {number['high']:.3f}]"
    return f"{number:.4g}" if isinstance(number, float) else str(number)
