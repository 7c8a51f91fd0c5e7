"""Shared by all tests: one folder of compiled kernels, so that what one test compiled another loads."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def kernels(tmp_path_factory):
    """Inductor's cache of one test run, for its process and those it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update` rewrites the golden files with what the tests find."""
    parser.addoption("--update", action="store_true", help="rewrite golden files")
