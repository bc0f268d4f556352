"""Draw a command's output as an SVG terminal: `practicum run quickstart | python docs/screenshot.py docs/demo.svg`."""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 132


def main() -> None:
    """Copy standard input to standard output and draw it into the file named on the command line."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ practicum run quickstart", style="bold"))
    for line in sys.stdin:
        print(line, end="", flush=True)
        style = (
            "cyan" if line.startswith("step ") else "bold green" if line.startswith("gain") else ""
        )
        console.print(
            Text(line.rstrip("\n"), style=style), soft_wrap=False, overflow="ellipsis", no_wrap=True
        )
    # The picture takes any monospaced font at hand and fetches none.
    svg = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="practicum"), flags=re.DOTALL)
    Path(sys.argv[1]).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
