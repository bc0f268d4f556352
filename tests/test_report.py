"""The report: one page that loads nothing, runs nothing, and shows what the run says about itself."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from practicum.diagnosis.report import write_report

HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(1)> "quoted" \u202egnihtemos\u2066 \x1b[31mred\x07 &amp;'


@pytest.fixture
def hostile(finished: Path, tmp_path: Path) -> str:
    """The page of a run in which every text is hostile."""
    folder = tmp_path / "toy"
    shutil.copytree(finished, folder)
    summary = json.loads((folder / "summary.json").read_text())
    for sample in summary["samples"]:
        sample.update(prompt=HOSTILE, answer=HOSTILE, before=HOSTILE, after=HOSTILE)
    (folder / "summary.json").write_text(json.dumps({**summary, "name": HOSTILE}))
    recipe = json.loads((folder / "recipe.json").read_text())
    recipe["recipe"]["about"] = recipe["recipe"]["student"]["model"] = HOSTILE
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return write_report(folder).read_text(encoding="utf-8")


class Elements(HTMLParser):
    """Collects every element with its attributes, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("which", ["plain", "hostile"])
def test_the_page_runs_nothing_and_loads_nothing(finished: Path, hostile: str, which: str) -> None:
    page = hostile if which == "hostile" else page_of(finished)
    for tag, attributes in Elements(page).found:
        assert tag not in {
            "script",
            "img",
            "iframe",
            "link",
            "object",
            "embed",
            "base",
            "form",
            "image",
            "foreignobject",
        }
        assert not [name for name in attributes if name.startswith("on") or name in {"src", "href", "srcset", "action"}]
    assert not re.search(r"(?<!xmlns=\")https?://|url\(|@import|//cdn", page)


def test_hostile_text_is_shown_and_not_obeyed(hostile: str) -> None:
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in hostile
    assert not set("\u202e\u2066\x1b\x07") & set(hostile)
    assert Elements(hostile).text.count("<script>alert(1)</script>") >= 4


def test_the_page_has_the_numbers_of_the_summary(finished: Path) -> None:
    page = page_of(finished)
    summary = json.loads((finished / "summary.json").read_text())
    for when in ("before", "after"):
        assert f"{summary[when]['reverse_kl']:.3g}" in page
        assert f"{summary[when]['accuracy']['mean']:.2f}" in page
    assert f"{summary['rollouts']} rollouts" in page and f"{summary['tokens']} tokens" in page


def test_the_page_has_a_curve_with_a_point_a_step(finished: Path) -> None:
    page = page_of(finished)
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert any("reverse KL" in figure for figure in figures)
    first = next(figure for figure in figures if "reverse KL" in figure)
    points = re.search(r'points="([^"]+)"', first)
    assert points is not None and len(points[1].split()) == 4
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"step 4: {last['reverse_kl']:.4g}" in page


def test_every_element_is_closed(finished: Path) -> None:
    page = page_of(finished)
    for tag in ("table", "tr", "td", "th", "svg", "figure", "html", "body", "head", "details", "pre"):
        assert len(re.findall(f"<{tag}[ >]", page)) == page.count(f"</{tag}>"), tag


def test_writing_it_again_gives_the_same_page(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    shutil.copytree(finished, folder)
    assert write_report(folder).read_text() == page_of(finished)
