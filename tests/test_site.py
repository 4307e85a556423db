"""The documentation site builds without a warning, is whole, and asks no other host for a thing."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import click
import pytest
from mkdocs.exceptions import PluginError

import e2sci
from e2sci.cli import main

ROOT = Path(__file__).parent.parent
FOREIGN = re.compile(r"^(https?:)?//")
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}
LINKED = {
    "stylesheet",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "icon",
    "modulepreload",
}


class Parsed(HTMLParser):
    """A page's anchors, its links, what a browser fetches for it, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.classes: set[str] = set()
        self.words: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.add(given.get("id", ""))
        self.classes |= set(given.get("class", "").split())
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED:
            self.fetched.append(given.get(LOADED[tag], ""))
        if tag == "link" and set(given.get("rel", "").split()) & LINKED:
            self.fetched.append(given.get("href", ""))
        self.fetched += re.findall(r"url\(['\"]?([^)'\"]+)", given.get("style", ""))

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Parsed]:
    return {path.name: Parsed(path) for path in site.glob("*.html")}


# ---- the site -----------------------------------------------------------------------------


def test_every_page_is_there(pages):
    assert {path.stem for path in ROOT.glob("docs/*.md")} == {Path(p).stem for p in pages} - {"404"}


def test_nothing_is_fetched_from_another_host(site, pages):
    for name, page in pages.items():
        assert page.fetched, name
        assert [url for url in page.fetched if FOREIGN.match(url)] == [], name
        assert "mermaid" not in page.classes, f"{name}: the theme would fetch mermaid"
    for style in site.rglob("*.css"):
        fetched = re.findall(r"(?:@import |url\()['\"]?([^)'\";]+)", style.read_text())
        assert [url for url in fetched if FOREIGN.match(url)] == [], style
    for picture in site.rglob("*.svg"):
        fetched = re.findall(r"(?:href|src)=\"(?!#)([^\"]*)\"|<script", picture.read_text())
        assert fetched == [], picture


def test_links_within_the_site_lead_somewhere(site, pages):
    for name, page in pages.items():
        for link in page.links:
            target, _, anchor = unquote(link).partition("#")
            if name == "404.html" or re.match(r"[a-z]+:", link):
                continue
            assert (site / target).exists(), f"{name}: {link}"
            there = pages.get(target or name)
            assert not anchor or anchor in there.anchors, f"{name}: {link}"


def test_sources_lead_to_the_repository(pages):
    links = [link for page in pages.values() for link in page.links if "/blob/main/" in link]
    assert any(link.endswith("/src/e2sci/session/edge.py") for link in links)
    for link in links:
        path = link.partition("/blob/main/")[2].partition("#")[0]
        assert (ROOT / path).exists(), link


def test_what_github_draws_is_drawn(site, pages):
    formulas = (ROOT / "docs/method.md").read_text().count("```math")
    assert (site / "method.html").read_text().count('<math xmlns="http') == formulas > 0
    for name, page in pages.items():
        text = page.text
        assert "```" not in text, name
        assert not re.search(r"\\(frac|max|hat|mathrm|alpha|arg)\b", text), name
        html = (site / name).read_text()
        assert not re.search(r"<p>[^<]*\n[-*] ", html), f"{name}: a list that is none here"
        assert not re.search(r"<p>\|", html), f"{name}: a table that is none here"


GITHUBS = """\
See [the code](../src/e2sci/session/edge.py#L1) and [this](method.md#limits).

- one
  - within
- two

```python run
print("[kept](../as/it/is)")
```

```math
\\hat r^2
```
"""


def test_pages_are_turned_from_githubs_markdown(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/_hooks")
    import rendering

    config = SimpleNamespace(extra={"repository": "https://example.org/e2sci/"})
    text = rendering.on_page_markdown(GITHUBS, None, config, None)
    edge = "https://example.org/e2sci/blob/main/src/e2sci/session/edge.py#L1"
    assert f"[the code]({edge}) and [this](method.md#limits)" in text
    assert "- one\n    - within\n- two\n" in text
    assert '```python\nprint("[kept](../as/it/is)")\n```\n' in text
    assert re.search(r'\n<div class="formula"><math [^\n]+</math></div>\n$', text)
    with pytest.raises(PluginError, match="a stateDiagram-v2 has no picture; run: make diagrams"):
        rendering.on_page_markdown("```mermaid\nstateDiagram-v2\n```", None, config, None)


# ---- what is taken from the code ----------------------------------------------------------


def commands(group: click.Group, ctx: click.Context) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        within = click.Context(command, info_name=name, parent=ctx)
        yield within.command_path, command
        if isinstance(command, click.Group):
            yield from commands(command, within)


def test_every_command_and_option_is_in_the_reference(pages):
    page = pages["cli.html"]
    for path, command in commands(main, click.Context(main, info_name="e2sci")):
        assert path.replace(" ", "-") in page.anchors, path
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.opts[0] in page.text, f"{path} {option.opts[0]}"
        first = " ".join((command.help or "").split("\n\n")[0].split()).replace("`", "")
        assert first in page.text, path


def test_the_public_names_are_in_the_reference(pages):
    documented = {anchor.rpartition(".")[2] for anchor in pages["api.html"].anchors}
    assert set(e2sci.__all__) <= documented


def test_every_example_is_shown_whole(pages):
    for path in ROOT.glob("examples/*.py"):
        last = path.read_text().splitlines()[-1]
        assert " ".join(last.split()) in pages["examples.html"].text, path.name


def test_there_is_a_picture_of_each_diagram_and_no_other(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/_hooks")
    import diagrams

    assert set(ROOT.glob("docs/diagrams/*.svg")) == set(diagrams.sources())


@cache
def messages() -> list[str]:
    """Every text of the source, … for what is filled in."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "…" for v in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def symptoms() -> list[str]:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def test_the_symptoms_are_many():
    assert len(symptoms()) > 40


@pytest.mark.parametrize("symptom", symptoms())
def test_a_symptom_is_what_the_code_says(symptom):
    pattern = ".*".join(re.escape(part.strip()) for part in symptom.split("…"))
    assert any(re.search(pattern, message, re.DOTALL) for message in messages())
