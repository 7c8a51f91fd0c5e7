"""The fast start on a CPU: the checks that it skips, and that it leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import ClassVar

import pytest
from torch._inductor import cpu_vec_isa

from passes.lower.cpu_start import door
from passes.lower.cpu_start.door import Shared, build_header, trusted_instructions
from passes.torch_private import LOWERING, without_lowering


@pytest.mark.parametrize(("called", "left"), [("mm", False), ("_mm_plus_mm", True)])
def test_a_stored_body_imports_lowering_only_for_kernels_that_torch_has_not(called, left):
    source = f"{LOWERING}\nextern_kernels.{called}(a, b)"
    code = without_lowering(source)
    assert ("select_algorithm" in code) == left
    actual: dict = {}
    exec(code.splitlines()[0], actual)
    exec(LOWERING, wanted := {})
    assert getattr(actual["extern_kernels"], called) is getattr(wanted["extern_kernels"], called)


@pytest.mark.full
def test_the_thread_that_builds_the_header_imports_no_more_of_the_compiler():
    code = (
        "import sys; from passes.lower.inductor import surroundings; from passes.lower.cpu_start.door import *;"
        "import_cpp_compiler(); before = set(sys.modules); build_header(surroundings);"
        "print([m for m in set(sys.modules) - before if m.startswith(('torch', 'functorch'))],"
        "'torch._inductor.lowering' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] False"


# ---- the instruction set ----------------------------------------------------------------------------


class Extension(cpu_vec_isa.VecISA):
    """An instruction set; `tested` are those for which a library of PyTorch's vectors was built."""

    tested: ClassVar[list[str]] = []

    def __init__(self, name, known=True):
        self.name, self.known = name, known

    def __str__(self):
        return self.name

    __hash__ = cpu_vec_isa.VecISA.__hash__

    def __eq__(self, other):
        return str(self) == str(other)

    def check_build(self, code):
        self.tested.append(self.name)
        return True

    def __bool__(self):
        return super().__bool__() and self.known


@pytest.fixture
def extensions():
    """Return a made-up processor's sets, best first: one it lacks, one its compiler lacks, and two it has."""
    sets = [Extension("avx9 amx"), Extension("avx9", known=False), Extension("avx8"), Extension("avx7")]
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_vec_isa, "supported_vec_isa_list", sets)
        patch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx7", "avx8", "avx9"])
        patch.setattr(cpu_vec_isa.platform, "machine", lambda: "x86_64")
        patch.setattr(Extension, "tested", [])
        yield sets
    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def test_the_best_instruction_set_is_taken_untested_and_forgotten(extensions):
    with trusted_instructions:
        assert str(cpu_vec_isa.pick_vec_isa()) == "avx8" and Extension.tested == []
    assert str(cpu_vec_isa.pick_vec_isa()) == "avx8" and Extension.tested == ["avx9", "avx8", "avx7"], "PyTorch looks itself"
    with trusted_instructions:
        pass
    assert cpu_vec_isa.valid_vec_isa_list.cache_info().currsize == 1, "a choice that PyTorch made stays"


def test_the_instruction_set_that_the_environment_names_is_taken(extensions, monkeypatch):
    monkeypatch.setattr(cpu_vec_isa, "get_isa_from_cpu_capability", lambda named, sets, none: sets[-1])
    with trusted_instructions:
        assert str(cpu_vec_isa.pick_vec_isa()) == "avx7"


# ---- the header -------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_the_header_is_built_without_vectors_where_none_are_wanted(capability, monkeypatch):
    sources = []
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    monkeypatch.setattr(door, "build_library", lambda source: sources.append(source) or (lambda: None))
    build_header(lambda: "here")
    with trusted_instructions:
        vectors = bool(cpu_vec_isa.pick_vec_isa())
    assert len(sources) == 1 and ("at::vec" in sources[0]) == vectors
    assert capability != "default" or not vectors


def test_a_compiler_that_builds_nothing_is_an_error_that_says_what_to_set(monkeypatch):
    def fails(source):
        raise OSError("g++: no such file")

    monkeypatch.setattr(door, "build_library", fails)
    with pytest.raises(RuntimeError, match=r"ATEN_CPU_CAPABILITY=avx2 .*: g\+\+: no such file"):
        build_header(lambda: "here")


# ---- threads ----------------------------------------------------------------------------------------


def test_a_context_of_two_threads_is_left_by_the_last_of_them():
    events, go, left = [], threading.Event(), threading.Event()

    @contextmanager
    def context():
        events.append("on")
        yield
        events.append("off")

    shared = Shared(context)

    def other():
        with shared:
            go.set()
            left.wait()

    thread = threading.Thread(target=other)
    thread.start()
    go.wait()
    with shared:
        assert events == ["on"]
    assert events == ["on"], "the other one is inside"
    left.set()
    thread.join()
    assert events == ["on", "off"]
    with shared:
        assert events == ["on", "off", "on"]


def test_a_context_that_cannot_be_entered_is_entered_the_next_time():
    tries = []

    @contextmanager
    def context():
        tries.append(1)
        if len(tries) == 1:
            raise OSError("disk")
        yield

    shared = Shared(context)
    with pytest.raises(OSError), shared:
        pass
    with shared:
        assert len(tries) == 2
