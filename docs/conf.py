"""Settings of the documentation site. `make site` builds it."""

import re
from importlib.metadata import version as read_version
from pathlib import Path
from typing import Any

project = "practicum"
author = copyright = "the practicum contributors"
version = release = read_version("practicum")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
default_role = "code"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = "practicum"
html_copy_source = False
html_show_sourcelink = False

autodoc_typehints = "none"

OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./)+([^)#]+)(#[^)]*)?\)")
"""A link out of its folder."""

MARK = re.compile(r"(?<=```yaml\n)# (?:objective|recipe|pipeline|extends|setting|overrides)\n")
"""The first line of an example, which says to the tests what it is."""

FOLDERS = {"evidence": "evidence", "field": "methods"}
"""Pages with a folder of generated pages."""

SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
ENTRY = re.compile(r"^- \[([^\]]+)\]\((\w[\w-]*)\.md\)", re.MULTILINE)


def prepare_page(app: Any, page: str, source: list[str]) -> None:
    """Show files of the repository as paths, hide marks of examples, and add the contents."""
    if page == "index":
        source[0] += "\n".join(_build_contents(source[0]))
    if page in FOLDERS:
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{FOLDERS[page]}/*\n```\n"
    if "/" not in page:
        source[0] = _name_files(source[0])
    source[0] = MARK.sub("", source[0])


def _name_files(text: str) -> str:
    """Replace links to files of the repository, which are no pages of the site, by paths."""
    return OUTSIDE.sub(r"\1 (`\2`)", text)


def _build_contents(index: str) -> list[str]:
    """Return a table of contents for each section of the index."""
    _, *parts = SECTION.split(index)
    lines = []
    for caption, text in zip(parts[::2], parts[1::2], strict=True):
        pages = [f"{title} <{page}>" for title, page in ENTRY.findall(text)]
        lines += ["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]
    return lines


def write_llms_text(app: Any, error: Exception | None) -> None:
    """Write `llms.txt`: the index with a link to the text of each page."""
    if error is not None or app.builder.format != "html":
        return
    index = (Path(app.srcdir) / "index.md").read_text("utf-8")
    text = re.sub(r"\]\((\w[\w-]*)\.md\)", r"](\1.html)", _name_files(index))
    (Path(app.outdir) / "llms.txt").write_text(text, "utf-8")


def setup(app: Any) -> None:
    """Connect the steps above."""
    app.connect("source-read", prepare_page)
    app.connect("build-finished", write_llms_text)
