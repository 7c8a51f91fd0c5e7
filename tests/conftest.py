"""Hooks for all tests: a shared folder of compiled kernels, so that one test loads the kernels another compiled. A browser."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
from browser import CHROMIUM, FLAGS

_kernels = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    """Set Inductor's cache for this test run, one thread per process, default signals; workers inherit them.

    PyTorch and its graphs hold over a million objects: garbage collection at the usual rate takes a tenth of the time.
    """
    gc.set_threshold(200_000)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes its background jobs and their children ignore it
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    config.stash[_kernels] = tempfile.TemporaryDirectory(prefix="kernels-", ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = config.stash[_kernels].name
    os.environ["XDG_CACHE_HOME"] = config.stash[_kernels].name  # tokens
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the cache of kernels."""
    if _kernels in config.stash:
        config.stash[_kernels].cleanup()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Move all but some cases of `sample` tests to the full run, all but some of its `sweep` tests to the release run.

    Keep only the `--part`.
    """
    for sampled, longer in (("sample", "full"), ("sweep", "release")):
        cases: dict[tuple[str, int], list[pytest.Item]] = {}
        for item in items:
            is_there = sampled == "sample" or item.get_closest_marker("full")
            if (mark := item.get_closest_marker(sampled)) and is_there and not item.get_closest_marker(longer):
                cases.setdefault((item.nodeid.partition("[")[0], *mark.args), []).append(item)
        for (_, count), group in cases.items():
            for item in set(group) - set(spread(group, count)):
                item.add_marker(longer)
    if part := config.getoption("--part"):
        number, parts = map(int, part.split("/"))
        items[:] = [item for at, item in enumerate(items) if at % parts == number - 1]


def spread(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    """Return `count` items at equal distances, including the first and the last."""
    if count >= len(items):
        return items
    return [items[round(at * (len(items) - 1) / max(count - 1, 1))] for at in range(count)]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update`, which rewrites the golden files, and `--part`, which runs a part of the tests."""
    parser.addoption("--update", action="store_true", help="rewrite golden files")
    parser.addoption("--part", help="run every n-th test: 1/4, 2/4, 3/4 and 4/4 are all of them")


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the lines that tests recorded (`record_property("counted", line)`), also those of worker processes."""
    reports = [r for group in ("passed", "failed") for r in terminalreporter.getreports(group)]
    for line in sorted({value for r in reports for key, value in r.user_properties if key == "counted"}):
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Start Chromium once."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()
