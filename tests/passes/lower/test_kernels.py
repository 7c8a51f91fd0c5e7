"""C++ kernels built several at a time, and found again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config

from passes.lower.cpu_start import kernels
from passes.lower.cpu_start.kernels import TOGETHER, Libraries, library_source
from passes.lower.store import Store

PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>"
TYPES = ["const float*", "float*"]


def adds(n: int) -> str:
    """Return a kernel that adds a number to four entries; the word kernel occurs in it several times."""
    return f'\n{PREFIX}\n// a kernel\nextern "C" void kernel(const float* x, float* y)\n{{ for (int i = 0; i < 4; i++) y[i] = x[i] + {n}; }}\n'


@pytest.fixture
def store(tmp_path, monkeypatch) -> Iterator[Store]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch(cpp_cache_precompile_headers=False):
        yield Store(tmp_path / "bodies")


@pytest.fixture
def built(monkeypatch) -> list[str]:
    """Return the sources that are built, or looked up from earlier builds."""
    sources, build = [], kernels.build_library
    monkeypatch.setattr(kernels, "build_library", lambda source: sources.append(source) or build(source))
    return sources


def added(load) -> list[float]:
    x, y = torch.arange(4.0), torch.zeros(4)
    load()(x, y)
    return (y - x).tolist()


def test_kernels_share_a_library_that_is_found_again(store, built):
    first = Libraries(store, "here")
    loads = [first.ask(TYPES, adds(n)) for n in (1, 2, 1)]
    assert not built and len(first.waiting) == 2
    first.build()
    first.build()
    assert len(built) == 1 and not first.waiting
    assert [added(load) for load in loads] == [[n] * 4 for n in (1.0, 2.0, 1.0)]

    again = Libraries(store, "here")
    assert [added(again.ask(TYPES, adds(n))) for n in (2, 1)] == [[2.0] * 4, [1.0] * 4]
    assert built == built[:1] * 2 and not again.waiting, "looked up once, with nothing new to build"

    elsewhere = Libraries(store, "another compiler")
    elsewhere.ask(TYPES, adds(1))
    assert len(elsewhere.waiting) == 1


def test_a_full_library_is_built_beside_what_follows(store, monkeypatch):
    built = []
    monkeypatch.setattr(kernels, "build_library", lambda source: built.append(source) or (lambda: None))
    libraries = Libraries(store, "")
    for n in range(2 * TOGETHER + 1):
        libraries.ask(TYPES, adds(n))
    assert [source.count("extern") for source in built] == [TOGETHER] * 2 and len(libraries.waiting) == 1


def test_a_library_that_was_damaged_is_built_again(store, built):
    first = Libraries(store, "")
    first.ask(TYPES, adds(3))
    first.build()
    key = next(iter(first.libraries))
    (store.folder / key).write_bytes(b"x" * 100)
    again = Libraries(store, "")
    with pytest.warns(UserWarning, match="damaged"):
        load = again.ask(TYPES, adds(3))
    again.build()
    assert len(built) == 2 and added(load) == [3.0] * 4


def test_what_was_precompiled_is_included_first():
    source = library_source([("one", kernels.CppKernel(("float*",), f"\n{PREFIX}\nint one;")),
                             ("two", kernels.CppKernel(("float*",), f"{PREFIX}\n#include <cmath>\nint two;"))])
    lines = source.splitlines()
    assert lines[:2] == [PREFIX, "#include <cmath>"] and source.count(PREFIX) == 1


def test_an_error_of_the_compiler_is_not_lost(store):
    libraries = Libraries(store, "")
    load = libraries.ask(TYPES, "this is not C++")
    libraries.build()
    with pytest.raises(Exception, match="this is not C|error"):
        load()
