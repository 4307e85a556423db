"""What edge and cloud say to each other: typed, binary, versioned. Token ids, never text.

    edge → cloud   Hello · Open · Window · Cancel
    cloud → edge   Welcome · Opened · Verdict · Finished · Error

A frame is one MessagePack array: a tag, then the fields in order. Positions are absolute indices
into prompt + output. `branch` counts the edge's cuts: a window of a branch the cloud has already
refused is dropped unread. The full text is docs/protocol.md.

A request's whole state lives on the edge (prompt, committed ids, credit), so a resume is an `Open`
with a longer prefix, on any replica.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Literal

import msgspec

from e2sci.decoding.acceptance import RuleParams
from e2sci.decoding.credit import CreditParams, CreditState
from e2sci.decoding.distribution import unpack_ids
from e2sci.decoding.sampling import SamplingParams

VERSION = 1
MAX_FRAME = 1 << 21
"""Bytes in a frame at most: a resume with a prompt and an output of MAX_TOKENS each fits."""
MAX_TOKENS = 1 << 18
MAX_WINDOW = 64
"""Draft tokens in one window at most."""
MAX_TOP = 20
"""Alternatives a committed token may come with at most."""
MAX_QUEUE = 128
"""Unjudged tokens a request may have at the cloud: twice the largest lookahead."""

FinishReason = Literal["stop", "length", "cancelled"]


class ProtocolError(Exception):
    """The peer said something it must not. `code` is one word for machines; `request` the request
    it was about, 0 if that can't be told; `retry_after_s`: when asking again may help."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retryable: bool = False,
        request: int = 0,
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.request = request
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Any message; fields travel in the order of their definition."""


class Hello(Message, tag=1, frozen=True, kw_only=True):
    """The edge's first frame: its model's vocabulary, so that ids mean the same at both ends."""

    version: int = VERSION
    model: str
    real_vocab: int
    fingerprint: str
    template: str = ""


class Welcome(Message, tag=2, frozen=True, kw_only=True):
    """The cloud's answer. `shared_vocab`: ids below it mean the same at both ends, and no other id
    is ever drafted or emitted; `fingerprint` is taken over these. `pass_ms`: measured
    (tokens, milliseconds) of a pass, ascending."""

    version: int = VERSION
    model: str
    vocab_size: int
    shared_vocab: int
    fingerprint: str
    template: str
    context: int
    eos: tuple[int, ...]
    pass_ms: tuple[tuple[int, float], ...] = ()


class Open(Message, tag=3, frozen=True, kw_only=True):
    """Begin a request, or go on with one: `committed` are output ids that are already final.

    `drafting`: whether windows will come at all; `lookahead`: whether they come without waiting
    for verdicts; `fill`: the cloud decodes by itself while none is there; `trace`: say why, for
    every position; `id`: what both ends call the request in their logs, the same after a resume;
    `top`: send the target's log-probability of every committed token, and of that many best ones.
    """

    request: int
    prompt: bytes
    committed: bytes = b""
    branch: int = 0
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    rule: RuleParams = RuleParams()
    credit: CreditParams = CreditParams()
    state: CreditState | None = None
    drafting: bool = True
    lookahead: bool = True
    fill: bool = True
    trace: bool = False
    id: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,32}\Z")] = ""
    top: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP)] | None = None


class Opened(Message, tag=4, frozen=True, kw_only=True):
    """The request has a place. `limit`: output tokens it can have, by wish and by context."""

    request: int
    limit: int


class Window(Message, tag=5, frozen=True, kw_only=True):
    """Draft tokens at `start`, …; `sketches` of q, one a token, for rules that need them. Without
    tokens: no drafts will come for now, and the cloud decodes by itself until the next window."""

    request: int
    branch: int
    start: int
    ids: bytes
    sketches: tuple[bytes, ...] = ()


class Judged(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Why one position went as it did (only on request). Divergences in nats, None without q;
    `window`: number of the pass that judged it."""

    position: int
    draft: int
    pick: int
    js: float | None
    tv: float | None
    p: float
    agreed: bool
    accepted: bool
    threshold: float
    credit: float
    window: int
    ms: float = 0.0


class Score(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the target thought of a committed token (only on request): its log-probability in nats
    at temperature 1, and the best `ids` with theirs, most probable first. -inf: it gives none."""

    log_prob: float
    ids: bytes = b""
    log_probs: tuple[float, ...] = ()


class CreditView(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Credit r̂, threshold T, the predictor's wish for W, and the state to resume with."""

    credit: float
    threshold: float
    window: int | None
    state: CreditState


class Verdict(Message, tag=6, frozen=True, kw_only=True):
    """What the cloud has committed from `start` on: the next `accepted` draft tokens of `branch`,
    then its own `ids`. With `rejected` the first of these is a correction and the branch is dead.

    No draft tokens judged (accepted = 0, not rejected): fill, or a bonus token. `tolerated`:
    offsets of accepted tokens that are not the target's own pick. `passes`, `fed`: target passes
    and tokens so far, prompt left out. `scores`: one a committed token, if the opening asks.
    """

    request: int
    branch: int
    start: int
    accepted: int = 0
    ids: bytes = b""
    rejected: bool = False
    tolerated: bytes = b""
    passes: int = 0
    fed: int = 0
    credit: CreditView | None = None
    trace: tuple[Judged, ...] = ()
    scores: tuple[Score, ...] = ()


class Finished(Message, tag=7, frozen=True, kw_only=True):
    """No more will come for this request."""

    request: int
    reason: FinishReason


class Cancel(Message, tag=8, frozen=True, kw_only=True):
    """Forget the request; the cloud frees its place and answers Finished("cancelled")."""

    request: int


class Error(Message, tag=9, frozen=True, kw_only=True):
    """Something is wrong with `request`, or with the connection (request = 0, which then ends).
    `retryable`: the same may work later or elsewhere, here not before `retry_after_s`."""

    request: int = 0
    code: str
    message: str
    retryable: bool = False
    retry_after_s: float = 0.0


AnyMessage = Hello | Welcome | Open | Opened | Window | Verdict | Finished | Cancel | Error

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode_message(message: Message) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_message(frame: bytes | str) -> AnyMessage:
    """The message in a frame. Raises ProtocolError when it is none of ours or too large."""
    if isinstance(frame, str):
        raise ProtocolError("malformed", "got a text frame; frames are binary MessagePack")
    if len(frame) > MAX_FRAME:
        raise ProtocolError("too_large", f"frame of {len(frame)} bytes; at most {MAX_FRAME}")
    try:
        return _decoder.decode(frame)
    except (msgspec.ValidationError, msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(
            "malformed", f"not a message of this protocol: {error}", request=_request_of(frame)
        ) from None
    except RecursionError:
        raise ProtocolError(
            "malformed", "not a message of this protocol: nested too deep"
        ) from None


def _request_of(frame: bytes) -> int:
    """The request an otherwise unreadable Open is about, so that only that request fails."""
    with suppress(msgspec.DecodeError, ValueError, RecursionError):
        match msgspec.msgpack.decode(frame):
            case [3, int(request), *_] if request > 0:
                return request
    return 0


def ids_of(data: bytes, vocab: int, limit: int, what: str) -> list[int]:
    """Unpack ids and check them. Raises ProtocolError naming the first id out of range."""
    try:
        ids = unpack_ids(data, limit)
    except ValueError as error:
        raise ProtocolError("malformed", f"{what}: {error}") from None
    for token in ids:
        if token >= vocab:
            raise ProtocolError(
                "bad_token", f"{what}: token id {token} is out of range; ids lie below {vocab}"
            )
    return ids
