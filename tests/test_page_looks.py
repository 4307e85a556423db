"""The page in a real browser: its charts, colours, sizes, and how soon it is there."""

from __future__ import annotations

import re

import pytest

from browsing import PHONE, SYNC, Visit, answered, chunk, stream, told
from serving import LiveEdge

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def edge(one_cloud):
    with LiveEdge(one_cloud) as edge:
        yield edge
        edge.idle()


# ---- charts -----------------------------------------------------------------------------------


def test_the_charts_are_of_the_answer(visit, edge):
    visit.ask("hello", accept="elastic", **SYNC)
    _, trace = answered(edge, "hello", accept="elastic")
    count = len(told(trace, "windows"))
    visit.until(  # they are drawn now and then, all at once
        "document.querySelectorAll('.js-plotly-plot').length === 4"
        f" && document.querySelector('#timeline').ariaLabel.includes('{count} windows')"
    )
    drawn = visit.page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')]"
        ".map(each => [each.id, each.data.map(trace => [trace.name, [...trace.x], [...trace.y]])]))"
    )
    windows = sum(len(x) for name, x, _ in drawn["timeline"] if name not in ("drafting", "fill"))
    assert windows == count
    credit = {name: y for name, _, y in drawn["credit"]}
    assert credit["credit"] == [each["credit"] for each in told(trace, "judged")]
    assert credit["threshold"] == [each["threshold"] for each in told(trace, "judged")]
    assert drawn["uplink"][0][2][-1] == trace[-1]["figures"]["uplink_bytes"]
    [alone] = {*next(y for name, _, y in drawn["speed"] if name == "cloud alone")}
    assert alone == pytest.approx(1000 / trace[-1]["figures"]["cloud_ms"])
    assert f"{windows} windows" in visit.attribute("#timeline", "aria-label")
    shown = visit.page.evaluate("document.querySelector('#timeline').layout.xaxis.range")
    assert 0 <= shown[0] < shown[1]
    figures = visit.text("#figures")
    for name in ("tokens/s", "first token", "accepted", "passes", "uplink", "round trip", "sync"):
        assert name in figures


def test_the_fate_of_windows(visit):
    """By what a stream tells: kept, kept in part, dropped with their branch, overtaken by fill."""
    told = [
        {"ms": 1, "windows": [w(1, 0, 10), w(1, 0, 12), w(1, 0, 14)]},
        {"ms": 2, "verdicts": [v(2, 0, 10, accepted=3, rejected=True)]},
        {"ms": 3, "windows": [w(3, 1, 14), w(3, 1, 16)]},
        {"ms": 4, "verdicts": [v(4, 1, 14, own=2)]},  # just what was drafted
        {"ms": 5, "verdicts": [v(5, 1, 16, accepted=1)]},
        {"ms": 6, "windows": [w(6, 2, 18)]},  # so branch 1 is over
    ]
    flights = visit.page.evaluate(
        """async told => {
          const { Tale } = await import('/page/tale.js');
          const tale = new Tale();
          for (const e2sci of told) tale.hear({ choices: [], e2sci });
          tale.close();
          return tale.flights.map(each => [each.start, each.fate, each.end]);
        }""",
        told,
    )
    assert flights == [
        [10, "accepted", 2],
        [12, "partly", 2],
        [14, "dropped", 2],
        [14, "accepted", 4],
        [16, "partly", 6],
        [18, "dropped", 6],
    ]


def w(ms, branch, start, tokens=2):
    return {"ms": ms, "branch": branch, "start": start, "tokens": tokens}


def v(ms, branch, start, accepted=0, rejected=False, own=0):
    own = own or int(rejected)
    return {**w(ms, branch, start), "accepted": accepted, "rejected": rejected, "own": own}


# ---- looks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(browser, edge, scheme):
    visit = Visit(browser, edge, color_scheme=scheme).open()
    colours = visit.page.evaluate(
        """() => {
          const probe = document.body.appendChild(document.createElement('i'));
          const of = name => (probe.style.color = `var(--${name})`, getComputedStyle(probe).color);
          const names = ['agreed', 'tolerated', 'corrected', 'filled', 'drafted', 'soft', 'ink'];
          const back = ['paper', 'panel', 'raised'];
          return [names.map(n => [n, of(n)]), back.map(n => [n, of(n)])];
        }"""
    )
    for name, front in colours[0]:
        for behind, back in colours[1]:
            assert contrast(front, back) >= 4.5, (name, behind)
    visit.page.click("#theme")  # light, then dark, whatever the system has
    assert visit.attribute("html", "data-theme") == "light"
    visit.page.click("#theme")
    assert visit.attribute("html", "data-theme") == "dark"
    visit.page.reload()
    paper = visit.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert luminance(paper) < 0.1
    visit.close()


def luminance(colour):
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(front, back):
    """WCAG's contrast ratio."""
    dark, light = sorted(map(luminance, (front, back)))
    return (light + 0.05) / (dark + 0.05)


def test_origins_differ_by_more_than_colour(visit):
    styles = visit.page.locator(".legend .token").evaluate_all(
        "all => all.map(each => getComputedStyle(each)).map(s => s.textDecorationLine"
        " === 'none' ? 'none' : s.textDecorationStyle)"
    )
    assert len(set(styles)) == len(styles) == 5


def test_a_phone_never_scrolls_sideways(browser, edge):
    visit = Visit(browser, edge, viewport=PHONE, has_touch=True).open()
    wide = "x" * 200
    pieces = [wide, "\n```\n", wide, "\n```\n", "end"]
    visit.page.route("**/chat/completions", lambda r: r.fulfill(**stream(chunk(pieces))))
    visit.ask(wide)
    for pane in ("instruments", "settings"):
        visit.page.click(f"#{pane} summary")
    visit.page.wait_for_selector("#uplink.js-plotly-plot")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    visit.page.locator(".answer .token").last.tap()
    assert visit.page.locator("#card").is_visible()
    card = visit.page.locator("#card").bounding_box()
    assert card["x"] >= 0
    assert card["x"] + card["width"] <= PHONE["width"]
    visit.close()


def test_nothing_moves_for_who_wants_that(browser, edge):
    names = "getComputedStyle(document.querySelector('.text'), '::after').animationName"
    moves = []
    for wish in ("no-preference", "reduce"):
        visit = Visit(browser, edge, reduced_motion=wish).open()
        visit.page.route("**/chat/completions", lambda route: None)  # no answer for now
        visit.begin("hello")
        visit.page.wait_for_selector(".text", state="attached")
        moves.append(visit.page.evaluate(names))
        visit.page.click("#stop")
        visit.close()
    assert moves == ["blink", "none"]


def test_an_answer_is_read_out_in_sentences(visit):
    visit.ask("hello", **SYNC)
    spoken = visit.page.locator("#spoken")
    assert spoken.get_attribute("aria-live") == "polite"
    whole = visit.page.locator(".answer .text").last.evaluate("each => each.textContent")
    visit.until("document.querySelector('#spoken').textContent !== ''")
    assert whole.strip().endswith(spoken.evaluate("each => each.textContent").strip())


def test_the_first_paint_comes_within_a_second(browser, edge):
    """The best of some loads: a busy machine is no fault of the page's."""
    paints = []
    for _ in range(3):
        visit = Visit(browser, edge).open()
        paints.append(
            visit.page.evaluate(
                "performance.getEntriesByName('first-contentful-paint')[0].startTime"
            )
        )
        visit.close()
    print(f"first paint, best of {len(paints)}: {min(paints):.0f} ms")
    assert min(paints) < 1000
