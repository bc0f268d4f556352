"""Draw a command and its output as an SVG terminal: `python docs/screenshot.py docs/demo.svg practicum run quickstart`.

Long outputs are shortened to their first and last lines; `--lines N` sets how many remain.
"""

import argparse
import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 132
STYLES = (
    (re.compile(r"step \d"), "cyan"),
    (re.compile(r"gain|verdict|GO\b|BETTER"), "bold green"),
    (re.compile(r"NO-GO|WORSE|.*alarm"), "bold red"),
)


def main() -> None:
    """Run the command, show its output, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    lines = []
    with subprocess.Popen(options.command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    if process.returncode:
        sys.exit(
            f"{options.command[0]} ended with exit code {process.returncode}; no picture is drawn"
        )
    options.file.write_text(draw(" ".join(options.command), lines, options.lines), "utf-8")


def draw(command: str, lines: list[str], count: int) -> str:
    """Return the picture of a command and its output, with at most `count` lines."""
    if len(lines) > count:
        half = count // 2
        lines = [*lines[:half], "...", *lines[len(lines) - half :]]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"))
    for line in lines:
        style = next((style for pattern, style in STYLES if pattern.match(line)), "")
        console.print(Text(line, style=style), soft_wrap=False, overflow="ellipsis", no_wrap=True)
    # The picture uses any monospaced font of the reader's machine and loads none.
    svg = console.export_svg(title="practicum")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    main()
