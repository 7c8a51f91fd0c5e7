"""Fixtures: a browser for the tests of pages, skipped if none is installed, and an object store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import CHROMIUM, FLAGS


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Start Chromium once."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def store() -> Iterator:
    """Serve an object store to this process and those that it starts."""
    from object_store import served  # importing moto takes half a second

    with served() as server:
        yield server
