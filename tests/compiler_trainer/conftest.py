"""Fixtures: an object store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def store() -> Iterator:
    """Serve an object store to this process and those that it starts."""
    from object_store import served  # importing moto takes half a second

    with served() as server:
        yield server
