"""Photograph the report of a run in a headless Chromium: `python docs/report_pictures.py runs/quickstart docs/img`."""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
COLOURS = 128


def main() -> None:
    """Three pictures: the first screen in light, the heat map in dark, and the heat map on a phone."""
    page, folder = (Path(sys.argv[1]) / "report.html").resolve(), Path(sys.argv[2])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=QUIET)
        kept(folder / "report-light.png", photographed(browser, page, (1280, 1000), "light"))
        kept(folder / "report-dark.png", photographed(browser, page, (1280, 860), "dark", "#heat"))
        kept(folder / "report-phone.png", photographed(browser, page, (390, 844), "light", "#heat"))
        browser.close()


def photographed(
    browser: Browser, path: Path, size: tuple[int, int], scheme: str, part: str | None = None
) -> bytes:
    """One screen of the page, with the part at its top."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, has_touch=True
    )  # type: ignore[arg-type]
    page: Page = context.new_page()
    page.goto(path.as_uri())
    if part is not None:
        page.evaluate(
            "part => document.querySelector(part).scrollIntoView({behavior: 'instant'})", part
        )
    if size[0] < 500:
        page.locator(".tokens > i").first.tap()
    picture = page.screenshot()
    context.close()
    return picture


def kept(path: Path, picture: bytes) -> None:
    """Write a picture with few colours, which a page of text does not miss."""
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        path, optimize=True
    )
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
