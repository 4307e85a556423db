"""The front door by TLS: who comes in, and certificates that do not work."""

from __future__ import annotations

import asyncio
import ssl

import pytest
import trustme
from websockets.exceptions import InvalidMessage

from doorway import (
    client,
    finished,
    front,
    get,
    opening,
    served,
    to_the_end,
    trusting,
)
from e2sci.server import cloud_app
from e2sci.server import keys as store
from e2sci.server.cloud_app import tls_context
from e2sci.server.keys import Keys
from live import HOST


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys.json"


@pytest.fixture
def alice(path):
    return store.add(path, "alice")


async def test_wss_with_a_key(path, alice, tmp_path):
    authority = trustme.CA()
    trust = trusting(authority)
    tls = served(authority, tmp_path)
    async with front(keys=Keys.load(path), tls=tls) as place:
        async with client(place, alice[1], scheme="wss", ssl=trust) as raw:
            version = raw.socket.transport.get_extra_info("ssl_object").version()
            assert version in ("TLSv1.2", "TLSv1.3")
            await raw.send(opening(tokens=3))
            assert await finished(raw) == (3, "length")
        with pytest.raises(ssl.SSLCertVerificationError):
            async with client(place, alice[1], scheme="wss", ssl=ssl.create_default_context()):
                pass
        with pytest.raises((InvalidMessage, ConnectionError)):
            async with client(place, alice[1], scheme="ws"):
                pass
        response = await get(place, "/readyz", scheme="https", verify=trust)
        assert response.text == "ready\n"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1:DeprecationWarning")
async def test_old_tls_is_refused(tmp_path):
    authority = trustme.CA()
    tls = served(authority, tmp_path)
    async with front(tls=tls) as place:
        assert tls.minimum_version == ssl.TLSVersion.TLSv1_2
        for version, fine in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
            trust = trusting(authority)
            trust.minimum_version = trust.maximum_version = version
            if fine:
                async with client(place, scheme="wss", ssl=trust):
                    pass
            else:
                with pytest.raises((ssl.SSLError, OSError)):
                    async with client(place, scheme="wss", ssl=trust):
                        pass


async def test_who_says_nothing_of_tls_is_sent_away(tmp_path, monkeypatch):
    monkeypatch.setattr(cloud_app, "OPEN_SECONDS", 0.3)
    async with front(tls=served(trustme.CA(), tmp_path)) as place:
        reader, writer = await asyncio.open_connection(HOST, place.port)
        assert await to_the_end(reader) == b""
        writer.close()


def test_certificates_and_keys_that_do_not_work(tmp_path):
    authority = trustme.CA()
    served(authority, tmp_path)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    other, nowhere, junk, locked = (tmp_path / n for n in ("other", "nowhere", "junk", "locked"))
    authority.issue_cert(HOST).private_key_pem.write_to_path(other)
    junk.write_text("junk")
    from cryptography.hazmat.primitives import serialization as s

    plain = s.load_pem_private_key(key.read_bytes(), None)
    secret = s.BestAvailableEncryption(b"secret")
    locked.write_bytes(
        plain.private_bytes(s.Encoding.PEM, s.PrivateFormat.TraditionalOpenSSL, secret)
    )
    for pair, words in {
        (cert, nowhere): "can't read .*nowhere: No such file",
        (nowhere, key): "can't read .*nowhere: No such file",
        (cert, tmp_path): "can't read .*: Is a directory",
        (cert, other): "the key .*other is not that of the certificate",
        (cert, locked): "locked is encrypted",
        (junk, key): "no certificate and key in PEM form",
        (cert, junk): "no certificate and key in PEM form",
        (key, cert): "no certificate and key in PEM form",
    }.items():
        with pytest.raises(ValueError, match=words) as error:
            tls_context(*pair)
        assert "\n" not in str(error.value)
