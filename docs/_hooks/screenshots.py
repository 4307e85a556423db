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
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent.parent / "images"
LARGEST = 150_000
QUESTION = "Write a Python function that says whether a number is prime."
ANSWER_MS = 300_000
KEPT = """localStorage.setItem("e2sci.settings", JSON.stringify({max_tokens: "160"}))"""
DRAWN_MS = 2_500  # what the last redraw may take


def chat(page: Page) -> None:
    """An answer, and the card of a token that was put right."""
    ask(page, QUESTION)
    page.locator(".answer .token.corrected, .answer .token.filled").last.hover()


def charts(page: Page) -> None:
    """A tolerant rule, whose divergences and threshold are drawn."""
    page.select_option("#accept", "elastic")
    ask(page, QUESTION)
    page.select_option("#span", "10")
    page.wait_for_timeout(DRAWN_MS)


def phone(page: Page) -> None:
    ask(page, "Why is the sky blue? Answer in three sentences.")


def ask(page: Page, question: str) -> None:
    page.fill("#question", question)
    page.press("#question", "Enter")
    page.wait_for_selector("#stop", state="visible")
    page.wait_for_selector("#stop", state="hidden", timeout=ANSWER_MS)
    page.wait_for_timeout(DRAWN_MS)


SHOTS: dict[str, tuple[int, int, str, Callable[[Page], None]]] = {
    "page": (1440, 900, "light", chat),
    "page-dark": (1440, 900, "dark", chat),
    "page-charts": (1440, 900, "light", charts),
    "page-phone": (360, 740, "light", phone),
}
"""Width, height, colours, and what is done, by file name."""


def main() -> None:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name in SHOTS:
            save(shot(browser, name, sys.argv[1]), IMAGES / f"{name}.png")
        browser.close()


def shot(browser: Browser, name: str, url: str) -> bytes:
    width, height, scheme, act = SHOTS[name]
    size = {"width": width, "height": height}
    context = browser.new_context(viewport=size, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    page.evaluate(KEPT)
    page.reload()
    page.wait_for_selector("#mode option", state="attached")
    act(page)
    if name == "page-charts":
        return page.locator("#instruments").screenshot()
    return page.screenshot()


def save(data: bytes, path: Path) -> None:
    """With as many colours as fit into the size that a page may carry."""
    whole = Image.open(BytesIO(data)).convert("RGB")
    whole.save(path, optimize=True)
    if path.stat().st_size > LARGEST:
        whole.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
