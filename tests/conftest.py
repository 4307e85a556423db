"""Fixtures that several files share."""

from __future__ import annotations

import os

import pytest

from live import LiveCloud

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
