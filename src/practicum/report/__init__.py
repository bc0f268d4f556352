"""The report: one self-contained page about a run, from its gain down to single tokens."""

from pathlib import Path

from practicum.report.markup import escape_text, render_document
from practicum.report.page import STYLE, build_page_parts, render_page
from practicum.report.run_data import read_run
from practicum.run_dir import write_text

__all__ = ["STYLE", "escape_text", "render_document", "write_report"]


def write_report(run: Path) -> Path:
    """Write `report.html` into a run folder, using only the folder's files; return its path."""
    path = run / "report.html"
    write_text(path, render_page(build_page_parts(read_run(run))))
    return path
