"""Pictures of the page for docs/images, by a headless Chromium, of a server that runs:

    e2sci cloud
    e2sci serve --temperature 0
    python docs/_hooks/screenshots.py http://127.0.0.1:8080/

They are kept with the pages, since the site is built where there are no models. `playwright` is in
the extra `dev`, Pillow comes with `bench`.
"""

from __future__ import annotations

import shutil
import sys
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent.parent / "images"
LARGEST = 150_000
STEPS = 51  # of brightness, where a picture is too large
QUESTION = "Write a Python function that says whether a number is prime."
ANSWER_MS = 300_000
KEPT = """localStorage.setItem("e2sci.settings", JSON.stringify({max_tokens: "120"}))"""
DRAWN_MS = 2_500  # what the last redraw may take


def main() -> None:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        desk(opened(browser, sys.argv[1], width=1360, height=820))
        phone(opened(browser, sys.argv[1], width=360, height=740))
        browser.close()


def desk(page: Page) -> None:
    """An answer with the card of a token that was put right, in both colours; then the charts of a
    tolerant rule, whose divergences and threshold are drawn."""
    page.select_option("#span", "10")
    ask(page, QUESTION)
    page.locator(".answer .token.corrected").nth(1).hover()
    save(page.screenshot(), "page")
    page.emulate_media(color_scheme="dark")
    page.wait_for_timeout(DRAWN_MS)
    save(page.screenshot(), "page-dark")
    page.emulate_media(color_scheme="light")
    page.select_option("#accept", "elastic")
    page.click("#new")
    ask(page, QUESTION)
    save(page.locator("#instruments").screenshot(), "page-charts")


def phone(page: Page) -> None:
    ask(page, "Why is the sky blue? Answer in three sentences.")
    save(page.screenshot(), "page-phone")


def opened(browser: Browser, url: str, *, width: int, height: int) -> Page:
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto(url)
    page.evaluate(KEPT)
    page.reload()
    page.wait_for_selector("#mode option", state="attached")
    return page


def ask(page: Page, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.wait_for_selector("#stop", state="visible")
    page.wait_for_selector("#stop", state="hidden", timeout=ANSWER_MS)
    page.wait_for_timeout(DRAWN_MS)


def save(data: bytes, name: str) -> None:
    """With coarser colours if it would be larger than a page's picture may be."""
    path = IMAGES / f"{name}.png"
    whole = Image.open(BytesIO(data)).convert("RGB")
    whole.save(path, optimize=True)
    if path.stat().st_size > LARGEST:
        whole.point([round(v / 255 * STEPS) * 255 // STEPS for v in range(256)] * 3).save(
            path, optimize=True
        )  # a palette would lose the origins' colours, which are on few pixels
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
