"""A cloud behind its door for tests: raw edges with keys, pages, certificates."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from e2sci.decoding.distribution import pack_ids, unpack_ids
from e2sci.engines.synthetic import EOS
from e2sci.runtime.cloud import Cloud
from e2sci.server.cloud_app import listening, tls_context
from e2sci.session.messages import Error, Finished, Open, Verdict
from live import HOST, TIMES, RawClient, cached, idle, target


@asynccontextmanager
async def front(engine=None, *, limits=None, **options):
    """A cloud behind its door; at the end nothing may be left in it."""
    engine = engine or target()
    async with Cloud(engine, times=TIMES, limits=limits) as cloud:
        async with listening(cloud, HOST, 0, **options) as port:
            yield SimpleNamespace(cloud=cloud, port=port, at=f"{HOST}:{port}")
        await idle(cloud)
        assert cached(engine) == 0


@asynccontextmanager
async def client(place, key=None, *, scheme="ws", greet=True, path="/", **options):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{scheme}://{place.at}{path}"
    async with connect(
        url, additional_headers=headers, compression=None, max_size=None, close_timeout=1, **options
    ) as socket:
        raw = RawClient(socket)
        if greet:
            await raw.hello()
        yield raw


def opening(request=1, *, tokens=2000, prompt=(104, 105), **fields):
    usual = {"drafting": False, "sampling": {"logit_bias": {EOS: -100.0}}}
    return Open(request=request, prompt=pack_ids(prompt), max_tokens=tokens, **{**usual, **fields})


async def answered(raw, message):
    """The first message that a request is answered with."""
    await raw.send(message)
    return await raw.receive()


async def finished(raw):
    """Read to the end of a request; (tokens, reason)."""
    tokens = 0
    while True:
        match await raw.receive():
            case Verdict(ids=ids):
                tokens += len(unpack_ids(ids, len(ids)))
            case Finished(reason=reason):
                return tokens, reason
            case Error() as error:
                return tokens, error.code


async def get(place, path, key=None, *, method="GET", scheme="http", **options):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(trust_env=False, **options) as http:
        return await http.request(method, f"{scheme}://{place.at}{path}", headers=headers)


async def turned_away(place, headers):
    """The HTTP response to a WebSocket that was not let in."""
    with pytest.raises(InvalidStatus) as refused:
        async with connect(f"ws://{place.at}", additional_headers=headers):
            pass
    return refused.value.response


async def to_the_end(reader):
    """All that comes, until the other end closes or breaks off."""
    with suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(), 20)
    return b""


def served(authority, folder, *names):
    """A server's context with a certificate for this machine."""
    cert = authority.issue_cert(*(names or (HOST,)))
    cert.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    cert.private_key_pem.write_to_path(folder / "key.pem")
    return tls_context(folder / "cert.pem", folder / "key.pem")


def trusting(authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context
