"""The tale of a text, for who asks for `e2sci.trace`: what its chunks carry beside OpenAI's fields.

One object a piece: the tokens that are final with it, by origin, what was judged, sent and heard on
the way there, and the figures so far (docs/serving.md has the fields). A chunk that has nothing
else to say then comes without choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from e2sci.runtime.options import Piece
from e2sci.server.openai_shapes import Choice, Shapes, Shown
from e2sci.session.messages import Judged


def told(shapes: Shapes, choice: Choice, piece: Piece, placed: Sequence[Shown]) -> dict[str, Any]:
    """What `piece` tells of `choice`; `placed`: the tokens that are final with it."""
    tale = piece.tale
    assert tale is not None  # it was asked for
    notice = {} if piece.notice is None else {"notice": piece.notice}
    return {
        "choice": choice.index,
        "ms": tale.ms,
        "tokens": [_token(shapes, each) for each in placed],
        "judged": [_judged(shapes, each) for each in tale.judged],
        "windows": tale.windows,
        "verdicts": tale.verdicts,
        "figures": tale.figures,
        **notice,
    }


def _token(shapes: Shapes, each: Shown) -> dict[str, Any]:
    commit = each.commit
    return {
        "position": commit.position,
        "id": commit.token,
        "text": shapes.token(commit.token),
        "bytes": list(shapes.tokenizer.piece(commit.token)),
        "origin": commit.origin,
        "offset": each.offset,
    }


def _judged(shapes: Shapes, judged: Judged) -> dict[str, Any]:
    fields = msgspec.structs.asdict(judged)
    fields["pass"] = fields.pop("window")
    fields["draft_text"] = shapes.token(judged.draft)
    fields["pick_text"] = shapes.token(judged.pick)
    return fields
