"""A real browser for tests of the page: a headless Chromium of this machine, none is downloaded."""

from __future__ import annotations

import codecs
import json
import re
import shutil
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
SECONDS = 30
PHONE = {"width": 360, "height": 740}
DESK = {"width": 1440, "height": 900}
SYNC = {"mode": "sync", "temperature": 1, "seed": 7, "max_tokens": 60}
"""Settings whose text is the same each time."""
CERTAIN = {"accept": "elastic"}
"""With SYNC, so are the origins. (Under strict a cloud that has read the prompt before the first
window is there writes a token by itself, so where windows end is for the clock to say.)"""


@contextmanager
def chromium():
    """A browser. Skips where there is none."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip(f"no Chromium is installed ({', '.join(NAMES)})")
    with driver.sync_playwright() as driven:
        browser = driven.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """One tab at an edge's page, that hears what the browser complains about, and whom it asks.

    `page`: playwright's; `complaints`: errors and warnings; `asked`: bodies of chat requests.
    """

    def __init__(self, browser, edge, **context) -> None:
        self.edge = edge
        self.context = browser.new_context(**{"viewport": DESK, **context})
        self.context.set_default_timeout(1000 * SECONDS)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._request)

    def _console(self, message) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _request(self, request) -> None:
        if not re.match(rf"(http://{re.escape(self.edge.at)}/|data:|blob:)", request.url):
            self.elsewhere.append(request.url)
        if request.url.endswith("/chat/completions") and request.method == "POST":
            self.asked.append(json.loads(request.post_data))

    def open(self) -> Visit:
        """The page, ready to be asked."""
        self.page.goto(f"http://{self.edge.at}/")
        self.page.wait_for_selector("#mode option", state="attached")
        return self

    def close(self) -> None:
        """Nothing may have been complained about, and nobody else asked."""
        self.context.close()
        assert self.complaints == []
        assert self.elsewhere == []

    def failed_loads(self) -> list[str]:
        """Complaints about answers that were errors, which are not counted any more."""
        failed = [each for each in self.complaints if "Failed to load resource" in each]
        self.complaints = [each for each in self.complaints if each not in failed]
        return failed

    # ---- what a user does -----------------------------------------------------------------

    def ask(self, question, **settings) -> None:
        """Ask and wait for the end of the answer."""
        self.begin(question, **settings)
        self.ended()

    def begin(self, question, **settings) -> None:
        self.set(**settings)
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")

    def set(self, **settings) -> None:
        for name, value in settings.items():
            field = self.page.locator(f"#{name}")
            if field.evaluate("each => each.tagName") == "SELECT":
                field.select_option(value)
            else:
                field.fill(str(value))

    def ended(self) -> None:
        self.page.wait_for_selector("#stop", state="hidden")
        self.page.wait_for_selector(".answer[aria-busy='true']", state="detached")

    def until(self, expression) -> None:
        """Wait until it is true. The page's own policy forbids `wait_for_function`."""
        for _ in range(20 * SECONDS):
            if self.page.evaluate(expression):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"it did not come true in time: {expression}")

    # ---- what a user sees -----------------------------------------------------------------

    def tokens(self, turn=-1) -> list[tuple[str, str]]:
        """(text, origin) of each token of an answer."""
        answer = self.page.locator(".answer").all()[turn]
        return [
            (text, kind.split()[1])
            for text, kind in answer.locator(".token").evaluate_all(
                "all => all.map(each => [each.textContent, each.className])"
            )
        ]

    def text(self, selector) -> str:
        return self.page.locator(selector).last.inner_text()

    def attribute(self, selector, name) -> str | None:
        return self.page.locator(selector).last.get_attribute(name)


# ---- answers: the API's own, and made-up ones ---------------------------------------------------


def answered(edge, question, before=(), **own):
    """The same from the API: an answer and what it tells, whole."""
    body = {
        "messages": [*before, {"role": "user", "content": question}],
        "seed": SYNC["seed"],
        "max_tokens": SYNC["max_tokens"],
        "logprobs": True,
        "top_logprobs": 5,
        "e2sci": {"mode": "sync", "trace": True, **own},
    }
    answer = edge.post(body=body).json()
    return answer["choices"][0], answer["e2sci"]["trace"]


def told(trace, what):
    return [each for piece in trace for each in piece[what]]


def stream(*chunks, done=True):
    """A made-up answer of the server, as `page.route` takes it."""
    lines = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"] * done
    body = "".join(f"data: {line}\n\n" for line in lines)
    return {"status": 200, "content_type": "text/event-stream", "body": body}


def chunk(pieces, ms=100.0, **more):
    """One with a token for each of `pieces`, bytes or texts."""
    pieces = [each.encode() if isinstance(each, str) else each for each in pieces]
    tokens = [
        {"position": i, "id": i, "text": "?", "bytes": [*piece], "origin": "agreed", "offset": 0}
        for i, piece in enumerate(pieces)
    ]
    text = b"".join(pieces).decode(errors="replace")
    return {
        "choices": [{"index": 0, "delta": {"content": text}}],
        "e2sci": {"choice": 0, "ms": ms, "tokens": tokens, **more},
    }


def shown(trace):
    """(text, origin) by token: a character goes to the token that completes it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    tokens = told(trace, "tokens")
    texts = [decoder.decode(bytes(each["bytes"])) for each in tokens]
    texts[-1] += decoder.decode(b"", final=True)
    return list(zip(texts, (each["origin"] for each in tokens), strict=True))
