"""Shared by all tests: one folder of compiled kernels, so that what one test compiled another loads."""

from __future__ import annotations

import gc
import os
import signal
import tempfile

import pytest

_kernels = pytest.StashKey[tempfile.TemporaryDirectory]()


def pytest_configure(config: pytest.Config) -> None:
    """Inductor's cache of one test run, one thread a process and signals as usual, which worker processes inherit.

    PyTorch is a million objects, and graphs are more: to search them for garbage as often as usual is a tenth of the time.
    """
    gc.set_threshold(200_000)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it, and all below
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    config.stash[_kernels] = tempfile.TemporaryDirectory(prefix="kernels-", ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = config.stash[_kernels].name
    os.environ["XDG_CACHE_HOME"] = config.stash[_kernels].name  # tokens
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes that cache."""
    if _kernels in config.stash:
        config.stash[_kernels].cleanup()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark cases of tests marked `sample(count)` as `full`, except so many evenly spread; keep one `--part` of all."""
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if (mark := item.get_closest_marker("sample")) and not item.get_closest_marker("full"):
            cases.setdefault((item.nodeid.partition("[")[0], *mark.args), []).append(item)
    for (_, count), found in cases.items():
        for item in set(found) - set(spread(found, count)):
            item.add_marker(pytest.mark.full)
    if part := config.getoption("--part"):
        number, parts = map(int, part.split("/"))
        items[:] = [item for at, item in enumerate(items) if at % parts == number - 1]


def spread(found: list[pytest.Item], count: int) -> list[pytest.Item]:
    """So many of them at equal distances, the first and the last among them."""
    if count >= len(found):
        return found
    return [found[round(at * (len(found) - 1) / max(count - 1, 1))] for at in range(count)]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update`, which rewrites the golden files, and `--part`, which runs a part of the tests."""
    parser.addoption("--update", action="store_true", help="rewrite golden files")
    parser.addoption("--part", help="run every n-th test: 1/4, 2/4, 3/4 and 4/4 are all of them")


def pytest_terminal_summary(terminalreporter) -> None:
    """Prints what tests counted (`record_property("counted", line)`), also when worker processes ran them."""
    reports = [r for group in ("passed", "failed") for r in terminalreporter.getreports(group)]
    for line in sorted({value for r in reports for key, value in r.user_properties if key == "counted"}):
        terminalreporter.write_line(line)
