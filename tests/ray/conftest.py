"""Fixtures of all tests of a cluster."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The cluster has its own loops."""
    return "asyncio"
