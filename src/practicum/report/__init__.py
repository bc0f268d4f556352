"""The report: one self-contained page about a run, from its gain down to single tokens."""

from pathlib import Path

from practicum.report.markup import render_document, escape_text
from practicum.report.page import STYLE, build_page_parts, render_page
from practicum.report.reading import read_run
from practicum.run_dir import write_text

__all__ = ["STYLE", "render_document", "escape_text", "write_report"]


def write_report(run: Path) -> Path:
    """Write `report.html` into a run folder, from the folder's files alone; return its path."""
    path = run / "report.html"
    write_text(path, render_page(build_page_parts(read_run(run))))
    return path
