"""Fixtures that several files share."""

from __future__ import annotations

import os

import pytest

from browsing import Visit, chromium
from live import LiveCloud
from streaming_server import StreamingServer

os.environ["E2SCI_CONFIG"] = os.devnull  # what this machine's user prefers is no matter


@pytest.fixture(scope="module")
def one_cloud():
    with LiveCloud() as cloud:
        yield cloud


@pytest.fixture
def cloud(one_cloud):
    """A cloud on a real port that must be as good as new after the test."""
    yield one_cloud
    one_cloud.check()


@pytest.fixture(scope="module")
def browser():
    """Of a module's own: while it lives, no other event loop can run in this thread."""
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser, edge):
    """A tab at the page of the module's `edge`, without complaints at its end."""
    visit = Visit(browser, edge).open()
    yield visit
    visit.close()


@pytest.fixture
def drafts_at(tmp_path):
    """An address for drafts."""
    tmp_path.chmod(0o700)
    return f"ipc://{tmp_path}/drafts"


@pytest.fixture
def vllm(drafts_at):
    """A stand-in for vLLM with the real proposer in it."""
    with StreamingServer(drafts_at, seconds=0.003) as vllm:
        yield vllm
