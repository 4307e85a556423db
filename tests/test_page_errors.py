"""The page in a real browser, when something goes wrong or is stopped."""

from __future__ import annotations

import pytest

from browsing import CERTAIN, SYNC, Visit, answered, chunk, shown, stream
from e2sci.engines.synthetic import SyntheticConfig
from e2sci.server import keys as store
from e2sci.server.keys import Keys
from live import LiveCloud, Watched, draft
from serving import LiveEdge

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def edge(one_cloud):
    with LiveEdge(one_cloud) as edge:
        yield edge
        edge.idle()


# ---- what goes wrong --------------------------------------------------------------------------


def test_stop_ends_it_at_both_ends(browser):
    slow = Watched(SyntheticConfig(seed=11, eos_bias=-20.0), seconds=0.02)
    with LiveCloud(slow) as cloud, LiveEdge(cloud, draft(eos_bias=-20.0)) as edge:
        visit = Visit(browser, edge).open()
        visit.begin("hello")
        visit.page.wait_for_selector(".answer .token.agreed", state="attached")
        visit.page.fill("#question", "typed meanwhile")
        visit.page.press("#question", "Enter")
        visit.page.click("#stop")
        visit.ended()
        assert visit.text(".notice") == "Stopped."
        edge.idle()
        assert visit.page.input_value("#question") == "typed meanwhile"
        assert len(visit.asked) == 1
        # A character that Stop broke is seen, and no part of the text.
        kept = "".join(text for text, _ in visit.tokens()).rstrip("\ufffd")
        visit.ask("more", max_tokens=4, seed=7)
        assert visit.asked[1]["messages"][1]["content"].startswith(kept)
        visit.close()


def test_a_cloud_that_is_gone_is_one_line_and_one_can_try_again(browser):
    with LiveCloud() as cloud, LiveEdge(cloud, patience=0.1) as edge:
        visit = Visit(browser, edge).open()
        cloud.kill()
        visit.ask("hello", **SYNC, **CERTAIN)
        assert visit.text(".error").startswith("No cloud answers: ")
        assert "\n" not in visit.text(".error")
        assert visit.failed_loads()
        cloud.start()
        visit.page.click("button:text-is('Try again')")
        visit.ended()
        assert visit.page.locator(".error").count() == 0
        assert visit.tokens() == shown(answered(edge, "hello", **CERTAIN)[1])
        assert [each["messages"] for each in visit.asked] == [visit.asked[0]["messages"]] * 2
        visit.close()


LOST = {"error": {"message": "it went", "code": "cloud_lost"}}


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (
            {"status": 429, "json": {"error": {"message": "try again", "code": "busy"}},
             "headers": {"Retry-After": "2"}},
            "All places are taken: try again (in 2 s)",
        ),
        (
            {"status": 400, "json": {"error": {"message": "window is 99", "code": None}}},
            "Window is 99",
        ),
        ({"status": 502, "body": "<html>"}, "The server says 502"),
        (
            stream(chunk(["a"]), LOST, done=False),
            "The cloud is lost: it went",
        ),
        (stream(chunk(["a"]), done=False), "The answer broke off: the edge server has gone."),
        (None, "The edge server does not answer. Is `e2sci serve` still running?"),
    ],
)  # fmt: skip
def test_every_error_is_one_line(visit, answer, line):
    def respond(route):
        return route.abort() if answer is None else route.fulfill(**answer)

    visit.page.route("**/chat/completions", respond)
    visit.ask("hello", **SYNC)
    assert visit.text(".error") == line
    visit.failed_loads()
    visit.page.unroute("**/chat/completions")
    visit.page.click("button:text-is('Try again')")
    visit.ended()
    assert visit.page.locator(".error").all_inner_texts() == []
    assert visit.tokens()


def test_a_question_without_an_answer_is_not_sent_again(visit):
    visit.page.route("**/chat/completions", lambda route: route.abort())
    visit.ask("lost")
    visit.failed_loads()
    visit.page.unroute("**/chat/completions")
    visit.ask("hello", max_tokens=4, seed=7)
    assert [message["content"] for message in visit.asked[-1]["messages"]] == ["hello"]


def test_a_key_is_asked_for(browser, one_cloud, tmp_path):
    _, secret = store.add(tmp_path / "keys", "alice")
    with LiveEdge(one_cloud, keys=Keys.load(tmp_path / "keys")) as edge:
        visit = Visit(browser, edge)
        visit.page.goto(f"http://{edge.at}/")
        visit.page.wait_for_selector("#key[open]")
        visit.page.fill("#key-text", "e2sci_wrong")
        visit.page.press("#key-text", "Enter")
        visit.page.wait_for_selector("#key[open]")
        visit.page.fill("#key-text", secret)
        visit.page.press("#key-text", "Enter")
        visit.page.wait_for_selector("#mode option", state="attached")
        assert len(visit.failed_loads()) == 2
        visit.ask("hello", max_tokens=4, seed=7)
        assert visit.tokens()
        stored = visit.page.evaluate("JSON.stringify(localStorage)")
        assert secret not in stored
        visit.close()


def test_what_is_typed_survives_a_reload(visit):
    visit.page.fill("#question", "half a thought")
    visit.page.reload()
    assert visit.page.input_value("#question") == "half a thought"
