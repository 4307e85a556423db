"""The page in a real browser: what one asks and sets there, and what one then sees."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from browsing import CERTAIN, SYNC, Visit, answered, chunk, shown, stream, told
from serving import LiveEdge

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def edge(one_cloud):
    with LiveEdge(one_cloud) as edge:
        yield edge
        edge.idle()


# ---- a conversation ---------------------------------------------------------------------------


def test_two_turns_show_what_the_api_tells(visit, edge):
    visit.ask("hello", **SYNC, **CERTAIN)
    first, trace = answered(edge, "hello", **CERTAIN)
    assert visit.tokens() == shown(trace)
    assert "".join(text for text, _ in visit.tokens()) == first["message"]["content"]

    visit.ask("and then", **SYNC, **CERTAIN)
    before = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first["message"]["content"]},
    ]
    second, more = answered(edge, "and then", before, **CERTAIN)
    assert visit.asked[1]["messages"] == [*before, {"role": "user", "content": "and then"}]
    assert visit.tokens() == shown(more)
    assert "".join(text for text, _ in visit.tokens()) == second["message"]["content"]

    counts = Counter(origin for turn in (0, 1) for _, origin in visit.tokens(turn))
    assert len(counts) > 1
    for origin in ("agreed", "tolerated", "corrected", "filled", "drafted"):
        assert visit.text(f"[data-origin={origin}] b") == str(counts[origin])
    assert f"{len(shown(more))} tokens" in visit.text(".foot")
    assert "seed 7" in visit.text(".foot")


def test_another_conversation_begins_from_nothing(visit):
    visit.ask("hello", **SYNC)
    visit.page.click("#new")
    assert visit.page.locator(".turn").count() == 0
    assert visit.page.locator("#intro").is_visible()
    assert visit.text("[data-origin=agreed] b") == "0"
    visit.ask("hello")
    assert [message["role"] for message in visit.asked[-1]["messages"]] == ["user"]


def test_what_a_model_writes_stays_text(visit):
    evil = "<img src=x onerror=document.title='gone'><script>alert(1)</script>"
    visit.page.route("**/chat/completions", lambda r: r.fulfill(**stream(chunk(["a ", evil]))))
    visit.ask("hello")
    assert visit.tokens() == [("a ", "agreed"), (evil, "agreed")]
    assert visit.page.locator(".answer img, .answer script").count() == 0
    assert visit.page.title() == "E²-SCI"


def test_a_character_that_stays_broken_takes_nothing_away(visit):
    pieces = ["a", b" b\xe2\x82"]
    visit.page.route("**/chat/completions", lambda r: r.fulfill(**stream(chunk(pieces))))
    visit.ask("hello")
    assert visit.tokens() == [("a", "agreed"), (" b\ufffd", "agreed")]


def test_code_stands_in_blocks_and_characters_are_whole(visit):
    pieces = [
        "So",
        ":\n",
        "```",
        "py",
        "\n",
        "a = ",
        "'",
        b"\xc3",
        b"\xa9",
        "'\n",
        "```\n\n",
        "end",
    ]
    visit.page.route("**/chat/completions", lambda r: r.fulfill(**stream(chunk(pieces))))
    visit.ask("hello")
    assert visit.page.locator(".answer pre").evaluate_all(
        "all => all.map(each => each.textContent)"
    ) == ["a = 'é'\n"]
    whole = "So:\n```py\na = 'é'\n```\n\nend"
    assert visit.page.locator(".answer .text").last.evaluate("each => each.textContent") == whole
    assert [text for text, _ in visit.tokens()][7:9] == ["", "é"]


def test_notices_stand_below_the_answer(visit):
    rests = chunk(["a"], notice="the draft rests", figures={"mode": "auto", "drafting": False})
    visit.page.route("**/chat/completions", lambda r: r.fulfill(**stream(rests)))
    visit.ask("hello")
    assert visit.text(".notice") == "the draft rests"
    assert "the draft rests" in visit.text("#figures")


def test_an_edge_without_a_cloud_drafts_alone(browser):
    with LiveEdge(None, name="alone") as edge:
        visit = Visit(browser, edge).open()
        visit.ask("hello", max_tokens=8, seed=7)
        assert visit.asked[0]["e2sci"] == {"mode": "draft", "trace": True}
        assert {origin for _, origin in visit.tokens()} == {"drafted"}
        assert "no cloud is there" in visit.text("#pair")
        visit.close()


def test_an_answer_is_copied(visit):
    visit.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit.page.route("**/chat/completions", lambda r: r.fulfill(**stream(chunk(["a\n", "b"]))))
    visit.ask("hello")
    visit.page.click("text=Copy")
    visit.page.wait_for_selector("text=Copied")
    assert visit.page.evaluate("navigator.clipboard.readText()") == "a\nb"


# ---- by keyboard, and the card ----------------------------------------------------------------


def test_all_by_keyboard(visit, edge):
    page = visit.page
    visit.set(**SYNC)
    page.reload()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "question"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    visit.ended()
    assert visit.asked[0]["messages"][0]["content"] == "one\ntwo"

    page.keyboard.press("Shift+Tab")  # Charts, Copy, then the answer
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    at = "Number(document.activeElement.dataset.index)"
    assert page.evaluate(at) == 0
    assert page.locator("#card").is_visible()
    for key, index in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1)):
        page.keyboard.press(key)
        assert page.evaluate(at) == index
    page.keyboard.press("End")
    assert page.evaluate(at) == len(visit.tokens()) - 1
    page.keyboard.press("ArrowUp")
    assert page.evaluate(at) < len(visit.tokens()) - 1
    assert page.locator(".answer [tabindex='0']").count() == 1
    page.keyboard.press("Escape")
    assert not page.locator("#card").is_visible()


def test_the_card_says_why_a_token_stands_there(visit, edge):
    visit.ask("hello", accept="elastic", threshold=0.05, **SYNC)
    choice, trace = answered(edge, "hello", accept="elastic", threshold=0.05)
    tokens, judged = (
        told(trace, "tokens"),
        {each["position"]: each for each in told(trace, "judged")},
    )
    index = next(i for i, each in enumerate(tokens) if each["origin"] == "corrected")
    record = judged[tokens[index]["position"]]
    score = choice["logprobs"]["content"][index]
    span = visit.page.locator(".answer .token").nth(index)
    span.hover()
    card = visit.text("#card")
    assert "corrected" in card
    assert f"{record['threshold']:.3f} nats" in card
    assert f"{record['js']:.3f} nats" in card
    assert f"{record['tv']:.3f}" in card
    assert f"{record['credit']:.3f}" in card
    drafted = record["draft_text"].replace(" ", "␣").replace("\n", "⏎")
    assert f"The draft was {drafted}." in card
    rows = visit.page.locator("#card li").all_inner_texts()
    for row, best in zip(rows, score["top_logprobs"], strict=False):
        assert f"{100 * math.exp(best['logprob']):.1f} %" in row.replace("\n", " ")
    assert visit.page.locator("#card li.here code").inner_text() == score["token"].replace(
        " ", "␣"
    ).replace("\n", "⏎")
    visit.page.mouse.move(5, 5)
    visit.page.wait_for_selector("#card", state="hidden")


def test_the_legend_is_a_filter(visit):
    visit.ask("hello", **SYNC)
    opacity = "each => getComputedStyle(each).opacity"
    agreed, corrected = (
        visit.page.locator(f".answer .token.{o}").first for o in ("agreed", "corrected")
    )
    visit.page.click("[data-origin=corrected]")
    assert visit.attribute("[data-origin=corrected]", "aria-pressed") == "true"
    assert float(agreed.evaluate(opacity)) < 1
    assert corrected.evaluate(opacity) == "1"
    visit.page.click("[data-origin=corrected]")
    assert agreed.evaluate(opacity) == "1"


# ---- settings ---------------------------------------------------------------------------------


def test_settings_are_what_is_asked_for(visit):
    visit.ask("hello", max_tokens=5)
    assert visit.asked[0]["e2sci"] == {
        "mode": "auto", "gamma": 0, "accept": "strict", "trace": True,
    }  # fmt: skip
    assert visit.asked[0]["temperature"] == 1
    assert "seed" not in visit.asked[0]
    visit.ask(
        "hello", mode="sync", accept="elastic", measure="regret", threshold=0.1, budget=0.02,
        window=3, temperature=0.5, seed=4,
    )  # fmt: skip
    wanted = {
        "mode": "sync", "accept": "elastic", "measure": "regret", "threshold": 0.1,
        "budget": 0.02, "window": 3, "trace": True,
    }  # fmt: skip
    assert visit.asked[1]["e2sci"] == wanted
    assert (visit.asked[1]["temperature"], visit.asked[1]["seed"]) == (0.5, 4)
    visit.page.reload()
    visit.page.wait_for_selector("#mode option", state="attached")
    visit.ask("hello")
    assert visit.asked[2]["e2sci"] == wanted
    visit.page.click("#switches [type=reset]")
    visit.ask("hello", max_tokens=5)
    assert visit.asked[3] == {**visit.asked[0], "messages": visit.asked[3]["messages"]}


def test_what_does_not_apply_is_disabled_and_says_why(visit):
    def reasons():
        all = visit.page.locator("#switches :is(input, select):disabled").all()
        return {each.get_attribute("id"): each.get_attribute("title") for each in all}

    assert set(reasons()) == {"measure", "threshold", "budget"}
    assert all(reasons().values())
    assert not visit.page.locator("#tolerant").is_visible()
    visit.set(mode="pipelined", accept="elastic")
    assert set(reasons()) == {"gamma"}
    assert "changes the large model's text" in visit.text("#tolerant")
    visit.set(mode="auto", accept="fuzzy")
    assert set(reasons()) == {"budget"}
    visit.set(mode="draft")
    assert set(reasons()) == {"gamma", "accept", "measure", "threshold", "budget", "window"}
    assert not visit.page.locator("#tolerant").is_visible()
    visit.ask("hello", max_tokens=8, seed=7)
    assert visit.asked[0]["e2sci"] == {"mode": "draft", "trace": True}
    assert {origin for _, origin in visit.tokens()} == {"drafted"}
