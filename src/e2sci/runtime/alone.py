"""The draft model alone: a generation without a cloud."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from e2sci.decoding.sampling import History, pick
from e2sci.engines.base import Engine, EngineError
from e2sci.runtime.caches import Cache
from e2sci.runtime.connection import EdgeError
from e2sci.runtime.options import Options, Piece, Result, Stats
from e2sci.runtime.record import Record
from e2sci.runtime.tale import Figures, Tale
from e2sci.runtime.worker import Worker, now
from e2sci.session.edge import Commit, Origin


async def alone(
    engine: Engine,
    worker: Worker,
    cache: Cache,
    record: Record,
    prompt: list[int],
    options: Options,
    limit: int,
) -> AsyncGenerator[Piece, None]:
    """At most `limit` tokens behind `prompt`, as they are drawn; the last piece carries the
    result. Raises EdgeError when the model fails."""
    info = engine.info
    history, reason = History(prompt), "length"
    for _ in range(limit):
        try:
            p = await worker.submit(lambda: cache.behind(engine, history.tokens, len(cache.tokens)))
        except EngineError as error:
            raise EdgeError(f"the draft model failed: {error}") from error
        token = pick(p.limited(info.real_vocab), options.sampling, history)
        commit = Commit(len(history), token, Origin.DRAFTED)
        history.append(token)
        yield _with_tale(record.add([commit]), record, options)
        if token in info.eos_ids or record.stopped:
            reason = "stop"
            break
    rest = record.close()
    stats = Stats(
        mode="draft",
        accept=options.accept,
        drafted=len(record.ids),
        **record.times(),  # type: ignore[arg-type]
    )
    result = Result(
        record.text,
        record.ids,
        reason,
        len(prompt),
        stats,
        record.commits,
        request_id=options.request_id,
    )
    yield _with_tale(Piece(rest, [], result), record, options)


def _with_tale(piece: Piece, record: Record, options: Options) -> Piece:
    """The piece, with its figures if they are wanted; nothing is sent, heard or judged."""
    if not options.tale:
        return piece
    speed = record.times()["decode_tokens_per_s"]
    figures = Figures(
        mode="draft",
        drafted=len(record.ids),
        tokens=len(record.ids),
        drafting=True,
        draft_ms=round(1000 / speed, 3) if speed else None,
    )
    return replace(piece, tale=Tale(round(1000 * (now() - record.began), 3), figures))
