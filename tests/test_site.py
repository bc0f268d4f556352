"""The documentation builds as a site without a warning, and is found by readers and by assistants."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"


def build(folder: Path, builder: str) -> Path:
    """Build the pages without a warning."""
    command = ["-m", "sphinx", "--fail-on-warning", "--keep-going", "-q", "-b", builder]
    process = subprocess.run(
        [sys.executable, *command, "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")],
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return folder / "html"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site"), "html")


@pytest.mark.long
def test_all_pages_and_their_links_are_read_without_a_warning(tmp_path: Path) -> None:
    build(tmp_path, "dummy")


@pytest.mark.slow
def test_every_page_is_built_and_can_be_searched(site: Path) -> None:
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert pages <= {path.stem for path in site.glob("*.html")}
    index = (site / "searchindex.js").read_text("utf-8")
    names = json.loads(re.sub(r"^Search.setIndex\(|\)$", "", index))["docnames"]
    assert pages <= set(names)


@pytest.mark.slow
def test_the_site_needs_no_other_server(site: Path) -> None:
    for path in site.glob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]+)"', path.read_text("utf-8"))
        assert not [address for address in loaded if "://" in address], path.name


@pytest.mark.slow
def test_public_names_are_in_the_reference(site: Path) -> None:
    text = (site / "api.html").read_text("utf-8")
    for name in ("practicum.run", "practicum.distill", "practicum.RunResult"):
        assert f'id="{name}"' in text


@pytest.mark.slow
def test_assistants_find_a_list_of_pages(site: Path) -> None:
    text = (site / "llms.txt").read_text("utf-8")
    linked = re.findall(r"\]\(([\w-]+\.html)\)", text)
    assert len(linked) > 40 and all((site / page).is_file() for page in linked)
