"""Pages are written for GitHub's view. This makes the site show them as it does.

    links to files outside of docs/    lead to the repository
    ```math                            becomes MathML, which browsers draw by themselves
    ```mermaid                         becomes the picture that `diagrams.py` has drawn of it
    ```python run, ```text exchange    lose the second word, which is for the tests
    lists within lists                 need four spaces here, two there

No page needs a script or a host other than the site's own for any of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent.parent
BRANCH = "blob/main"
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A page's text as the site's Markdown wants it. Raises PluginError on a diagram not drawn."""
    base = f"{config.extra['repository'].rstrip('/')}/{BRANCH}"
    written, at = [], 0
    for fence in FENCE.finditer(markdown):
        written += [_prose(markdown[at : fence.start()], base), _fence(fence)]
        at = fence.end()
    return "".join(written) + _prose(markdown[at:], base)


def diagram(source: str) -> str:
    """The path within docs/ of the picture of a diagram."""
    return f"diagrams/{hashlib.sha256(source.encode()).hexdigest()[:12]}.svg"


def _prose(text: str, base: str) -> str:
    text = re.sub(r"\]\(\.\./([^)\s]+)\)", rf"]({base}/\1)", text)
    return re.sub(r"^ {2,3}(?=[-*] )", "    ", text, flags=re.MULTILINE)


def _fence(fence: re.Match[str]) -> str:
    info, body = fence["info"].strip(), fence["body"]
    shown: dict[str, Callable[[str], str]] = {"math": _math, "mermaid": _mermaid}
    if info in shown:
        return shown[info](body)
    return f"```{info.partition(' ')[0]}\n{body}```"


def _math(source: str) -> str:
    return f'<div class="formula">{convert(source.strip(), display="block")}</div>'


def _mermaid(source: str) -> str:
    path = diagram(source)
    if not (DOCS / path).exists():
        first = source.strip().splitlines()[0]
        raise PluginError(f"a {first} has no picture; run: make diagrams")
    return f"[![diagram]({path})]({path})"
