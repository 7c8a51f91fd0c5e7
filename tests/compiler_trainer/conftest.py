"""A browser for the tests of pages, skipped where none is installed, and an object store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import CHROMIUM, FLAGS


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Chromium, started once."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def store() -> Iterator:
    """An object store, which this process and those that it starts reach."""
    from object_store import served  # moto is half a second

    with served() as found:
        yield found
