"""The page in a real browser: it draws, responds to pointer, finger and keyboard, and loads nothing else.

Needs a Chromium on the machine and Playwright for Python; without either the tests are skipped.
"""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_pages import copied

from practicum.cli.watch import open_server
from practicum.report.live import LivePage

pytest.importorskip(
    "playwright", reason="Playwright for Python is not installed: pip install playwright"
)
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: install the chromium package"
)
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]

READ = (
    "h1,h2,h3,h4,h5,p,td,th,dt,dd,li span,code,a,legend,figcaption,output,summary,"
    ".tokens > i,.choices span,svg text,.key,small,b"
)
CONTRAST = """(read) => {
  const channel = (v) => v / 255 <= .03928 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return { rgb: n.slice(0, 3), a: n[3] ?? 1 }; };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.a === 1) return colour.rgb;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll(read)) {
    if (!element.textContent.trim() || element.closest("[hidden]") || !element.getClientRects().length) continue;
    const style = getComputedStyle(element), drawn = element instanceof SVGElement;
    const ink = parse(drawn ? style.fill : style.color).rgb;
    const [a, b] = [light(ink), light(ground(element))].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    const kind = drawn ? element.className.baseVal : element.className;
    if (ratio < 4.5) poor.push([element.tagName, kind, element.textContent.slice(0, 20), ratio.toFixed(2)].join(" "));
  }
  return [...new Set(poor)];
}"""
BOXES = """() => [...document.querySelectorAll("svg.plot")].filter((e) => e.getClientRects().length)
  .map((e) => { const box = e.getBBox(); return [box.width, box.height]; })"""
STOPS = """() => {
  const wanted = 'a[href], summary, .plot[tabindex], .scroll, .tokens > i[tabindex="0"], input:checked, pre';
  const stops = [...document.querySelectorAll(wanted)].filter((e) => e.checkVisibility());
  stops.forEach((e, n) => { e.dataset.stop = n; });
  return stops.length;
}"""
CLASSES = """() => document.querySelector(".tokens").replaceChildren(
  ...["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "b1", "b2", "b3", "b4"].map((name) => {
    const e = document.createElement("i"); e.className = name; e.textContent = "text"; return e; }))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


class Opened:
    """A page in a separate browser, with its messages and requests."""

    def __init__(self, browser: Browser, address: str, **settings: Any) -> None:
        settings = {"viewport": {"width": 1280, "height": 900}, **settings}
        self.context = browser.new_context(**settings)
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


def opened(browser: Browser, folder: Path, **settings: Any) -> Opened:
    return Opened(browser, f"file://{folder}/report.html", **settings)


@pytest.mark.parametrize("which", ["rich", "harmful"])
def test_it_loads_draws_and_asks_for_nothing(
    browser: Browser, which: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(which)
    with opened(browser, folder) as it:
        boxes = it.page.evaluate(BOXES)
        assert len(boxes) >= 8 and all(width > 100 and height > 40 for width, height in boxes)
        lines = it.page.evaluate(
            "[...document.querySelectorAll('.chart polyline')].map((e) => e.getTotalLength())"
        )
        assert lines and max(lines) > 100
        assert it.page.evaluate("document.querySelectorAll('img, main script, iframe').length") == 0
        it.page.wait_for_timeout(100)
        assert it.said == [] and it.asked == [f"file://{folder}/report.html"]


def test_text_that_would_do_harm_is_only_text(browser: Browser, harmful: Path) -> None:
    with opened(browser, harmful) as it:
        token = it.page.locator(".tokens > i").first
        token.click()
        detail = it.page.locator(".detail")
        assert "<script>alert(1)</script>" in (detail.text_content() or "")
        assert "\\u202e" in (detail.text_content() or "") and "\\x1b[31m" in (
            detail.text_content() or ""
        )
        assert (
            it.page.evaluate("document.querySelectorAll('.detail img, .detail script').length") == 0
        )
        whole = it.page.evaluate("document.documentElement.innerText")
        assert not set("\u202e\u2066\x1b\x07") & set(whole) and it.said == []


def test_the_heat_map_answers_to_pointer_click_and_keys(browser: Browser, rich: Path) -> None:
    trace = json.loads((rich / "before.json").read_text())["student"]["traces"][0]
    with opened(browser, rich) as it:
        detail, tokens = it.page.locator(".detail"), it.page.locator('.tokens[data-view="0"] > i')
        assert tokens.count() == len(trace["text"])
        tokens.nth(1).hover()
        expect(detail).to_contain_text(f"token 2 of {len(trace['text'])}")
        expect(detail).to_contain_text(f"{100 * trace['teacher']['probabilities'][1][0]:.1f} %")
        assert detail.locator(".student li").count() == detail.locator(".teacher li").count() == 5
        tokens.nth(0).click()
        tokens.nth(1).hover()
        expect(detail).to_contain_text("token 1 of")  # a click stays until the next click
        tokens.nth(0).click()
        tokens.nth(1).hover()
        expect(detail).to_contain_text("token 2 of")
        tokens.nth(0).focus()
        it.page.keyboard.press("ArrowRight")
        expect(tokens.nth(1)).to_be_focused()
        expect(detail).to_contain_text("token 2 of")
        it.page.keyboard.press("Home")
        expect(tokens.nth(0)).to_have_attribute("aria-selected", "true")
        expect(tokens.nth(1)).to_have_attribute("aria-selected", "false")


@pytest.mark.slow
def test_another_quantity_gives_other_colours_and_another_scale(
    browser: Browser, rich: Path
) -> None:
    with opened(browser, rich) as it:
        colours = "[...document.querySelectorAll('.tokens > i')].map((e) => getComputedStyle(e).backgroundColor).join()"
        found = {it.page.evaluate(colours)}
        names = it.page.locator('input[name="quantity"]')
        assert names.count() == 5
        names.nth(0).focus()
        for number in range(1, 5):
            it.page.keyboard.press("ArrowRight")
            expect(names.nth(number)).to_be_checked()
            found.add(it.page.evaluate(colours))
            assert it.page.locator(".scale:visible").count() == 1
        assert len(found) == 5


@pytest.mark.slow
def test_a_curve_is_read_by_pointer_and_by_arrow_keys(browser: Browser, rich: Path) -> None:
    rows = [json.loads(line) for line in (rich / "metrics.jsonl").read_text().splitlines()]
    with opened(browser, rich) as it:
        chart = it.page.locator(".chart").first
        plot, reading = chart.locator("svg"), chart.locator(".reading")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box is not None
        it.page.mouse.move(box["x"] + box["width"] * 46 / 400 + 1, box["y"] + 40)
        expect(reading).to_have_text(f"step 1: {rows[0]['reverse_kl']:.4g}")
        plot.focus()
        it.page.keyboard.press("End")
        it.page.keyboard.press("ArrowLeft")
        expect(reading).to_have_text(f"step 3: {rows[2]['reverse_kl']:.4g}")


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_needs_no_sideways_scrolling(
    browser: Browser, rich: Path, harmful: Path, width: int
) -> None:
    for folder in (rich, harmful):
        with opened(
            browser, folder, viewport={"width": width, "height": 800}, has_touch=True
        ) as it:
            wide, room = it.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert wide <= room
            it.page.locator(".tokens > i").nth(1).tap()
            expect(it.page.locator(".detail")).to_contain_text("token 2 of")


@pytest.mark.slow
def test_light_and_dark_are_different_and_both_can_be_read(browser: Browser, rich: Path) -> None:
    grounds = set()
    for scheme in ("light", "dark"):
        with opened(browser, rich, color_scheme=scheme) as it:
            grounds.add(it.page.evaluate("getComputedStyle(document.body).backgroundColor"))
            for number in range(it.page.locator('input[name="quantity"]').count()):
                it.page.locator(".choices label").nth(number).click()
                assert it.page.evaluate(CONTRAST, READ) == [], scheme
    assert len(grounds) == 2


@pytest.mark.slow
def test_every_colour_of_the_scales_can_be_read_and_told_apart(
    browser: Browser, rich: Path
) -> None:
    for scheme in ("light", "dark"):
        with opened(browser, rich, color_scheme=scheme) as it:
            it.page.evaluate(CLASSES)
            assert it.page.evaluate(CONTRAST, READ) == [], scheme
            colours = it.page.evaluate(
                "[...document.querySelector('.tokens').children].map((e) => getComputedStyle(e).backgroundColor)"
            )
            assert len(set(colours)) == 12


@pytest.mark.slow
def test_the_tab_key_reaches_everything_that_answers(browser: Browser, rich: Path) -> None:
    with opened(browser, rich) as it:
        wanted = it.page.evaluate(STOPS)
        reached = set()
        for _ in range(wanted + 5):
            it.page.keyboard.press("Tab")
            reached.add(it.page.evaluate("document.activeElement.dataset.stop ?? null"))
        assert reached - {None} == {str(number) for number in range(wanted)}


@pytest.mark.slow
def test_without_javascript_the_page_still_reads(browser: Browser, rich: Path) -> None:
    with opened(browser, rich, java_script_enabled=False) as it:
        assert (
            it.page.locator(".controls:visible").count() == 0
            and it.page.locator(".detail:visible").count() == 0
        )
        expect(it.page.locator("noscript")).to_have_count(1)
        expect(it.page.locator(".reading").first).to_contain_text("step 4:")
        assert (
            it.page.locator(".tokens > i").count() > 20
            and it.page.locator(".scale:visible").count() == 1
        )


@pytest.fixture
def watched(finished: Path, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Serve a run that has not finished a step yet, and return the address of its live page."""
    folder = copied(finished, tmp_path / "toy")
    for name in ("summary.json", "after.json", "report.html"):
        (folder / name).unlink()
    for name in ("metrics.jsonl", "rollouts.jsonl", "alarms.jsonl", "timings.jsonl", "run.lock"):
        (folder / name).write_text("")
    server = open_server(LivePage(folder), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


def append(source: Path, folder: Path, name: str, first: int, last: int) -> None:
    """Let the run write the rows of some steps."""
    rows = [
        line
        for line in (source / name).read_text().splitlines()
        if first <= json.loads(line)["step"] <= last
    ]
    with (folder / name).open("a") as file:
        file.write("".join(row + "\n" for row in rows))


@pytest.mark.slow
def test_a_live_page_follows_the_run_and_leaves_the_reader_in_place(
    browser: Browser, finished: Path, watched: tuple[Path, str]
) -> None:
    folder, address = watched
    with Opened(browser, address) as it:
        status = it.page.locator(".live")
        expect(it.page.locator("#verdict")).to_contain_text("0 of 4 steps")
        expect(status).to_contain_text(
            "no step finished yet; no process writes this run any more", timeout=10_000
        )
        for name in ("rollouts.jsonl", "timings.jsonl", "metrics.jsonl"):
            append(finished, folder, name, 1, 2)
        expect(it.page.locator("#verdict")).to_contain_text("2 of 4 steps", timeout=10_000)
        expect(it.page.locator("nav")).to_contain_text("Curves")

        tokens = it.page.locator('.tokens[data-view="0"] > i')
        tokens.nth(1).focus()
        it.page.locator(".choices label").nth(1).click()
        tokens.nth(1).click()
        it.page.locator("#again summary").click()
        it.page.locator("#again").scroll_into_view_if_needed()
        place = it.page.evaluate("document.getElementById('again').getBoundingClientRect().top")
        for name in ("rollouts.jsonl", "timings.jsonl", "metrics.jsonl"):
            append(finished, folder, name, 3, 4)
        expect(it.page.locator("#verdict")).to_contain_text("4 of 4 steps", timeout=10_000)
        expect(it.page.locator('input[name="quantity"]').nth(1)).to_be_checked()
        expect(it.page.locator(".detail")).to_contain_text("token 2 of")
        assert it.page.evaluate("document.querySelector('#again details').open") is True
        moved = (
            it.page.evaluate("document.getElementById('again').getBoundingClientRect().top") - place
        )
        assert abs(moved) <= 2

        for name in ("after.json", "summary.json"):
            shutil.copy(finished / name, folder / name)
        expect(status).to_have_text("finished", timeout=10_000)
        expect(it.page.locator("#verdict")).to_contain_text(
            "accuracy on 8 held-out prompts, which are too few"
        )
        assert it.said == [] and all(url.startswith(address) for url in it.asked)
