"""Draws the mermaid diagrams of the pages, once: `make diagrams`.

The pictures are kept in docs/diagrams, named by the hash of their source, so the site needs neither
a script in the reader's browser nor this tool when it is built. Pictures of no diagram are removed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rendering import DOCS, FENCE, diagram


def sources() -> dict[Path, str]:
    """Every diagram of the pages, by the path of its picture."""
    fences = [f for page in sorted(DOCS.glob("*.md")) for f in FENCE.finditer(page.read_text())]
    return {DOCS / diagram(f["body"]): f["body"] for f in fences if f["info"] == "mermaid"}


def main() -> None:
    import mermaidx  # not in the extra: needed only when a diagram changes

    wanted = sources()
    for path in set(DOCS.glob("diagrams/*.svg")) - wanted.keys():
        path.unlink()
    for path, source in wanted.items():
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(mermaidx.render(source).svg())
            print(path.relative_to(DOCS.parent), file=sys.stderr)


if __name__ == "__main__":
    main()
