"""The report: one self-contained page with what a run gained, where its divergence sits, and what became of every token."""

from pathlib import Path

from practicum.report.markup import document, number, safe
from practicum.report.page import STYLE, page, parts_of
from practicum.report.reading import read_run
from practicum.run_dir import write_text

__all__ = ["STYLE", "document", "number", "safe", "write_report"]


def write_report(run: Path) -> Path:
    """Write `report.html` into a run folder from what stands in it; returns its path."""
    path = run / "report.html"
    write_text(path, page(parts_of(read_run(run))))
    return path
