"""A browser for the tests of pages, skipped where none is installed, and an object store."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest
from browser import CHROMIUM, FLAGS
from object_store import Store


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
def store() -> Iterator[Store]:
    """An object store, which this process and those that it starts reach."""
    with pytest.MonkeyPatch.context() as patch:
        found = Store()
        for name, value in found.env.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        yield found
        found.stop()
        fsspec.filesystem("s3").clear_instance_cache()
