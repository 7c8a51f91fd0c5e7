"""The fast start on a CPU, a context in which Inductor is patched; on exit it is as before.

    with fast_cpu_start(store, surroundings) as libraries:
        ...                              # lower bodies: Inductor asks for their C++ kernels
    # all kernels are built and loaded

Inside, kernels of several bodies are built as one library (`kernels.py`), while the next bodies are lowered, and
instruction sets are not tested. `prepare` precompiles the header of all kernels during capture. Files of Inductor's
cache are checked before they are executed: `checked_files` alone does that for kernels that Inductor builds by itself.

Only time depends on this. `lower.fast_start=false` turns it off. If it fails because PyTorch has changed, bodies are
compiled without it (`inductor.compiled_for_cpu`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from threading import Lock

from passes.lower.cpu_start.kernels import CppKernel, Libraries, library_source
from passes.lower.cpu_start.ready import options_at_import, options_untouched
from passes.lower.store import Store, body_store, replace
from passes.torch_private import (
    build_library,
    compiler_folder,
    execute_only,
    import_cpp_compiler,
    instruction_set,
    instructions_untested,
    kernels_together,
)


class Shared:
    """A context that several threads may be in at once: the first one enters it, and the last one leaves it."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]) -> None:
        self.context, self.lock, self.threads, self.stack = context, Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if not self.threads:
                self.stack.enter_context(self.context())
            self.threads += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.threads -= 1
            if not self.threads:
                self.stack.close()


@contextmanager
def fast_cpu_start(store: Store, surroundings: Callable[[], str]) -> Iterator[Libraries]:
    """Collect the C++ kernels of the bodies that are compiled inside; on exit all are built, and Inductor is unpatched.

    `surroundings` returns everything that kernels depend on except their source. Raises RuntimeError if nothing can be
    built.
    """
    header = prepare(surroundings)
    try:
        with checked_files, trusted_instructions:
            libraries = Libraries(store, surroundings())
            with kernels_together(libraries.ask, libraries.build):
                yield libraries
                header.result()  # before an error of the kernels, because its message has the fix
    finally:
        wait([header])  # the thread uses the patched Inductor, too


@cache
def prepare(surroundings: Callable[[], str]) -> Future[None]:
    """Start a thread, once per process, that does the work without which no kernel can be built."""
    options_untouched()
    import_cpp_compiler()
    options_at_import()
    return ThreadPoolExecutor(1, "ready for C++").submit(build_header, surroundings)


def build_header(surroundings: Callable[[], str]) -> None:
    """Precompile the header that every C++ kernel includes, and compute the digest of the surroundings before that.

    Raises RuntimeError if kernels cannot be built or loaded.
    """
    with checked_files, trusted_instructions:
        surroundings()  # loads libraries, and PyTorch caches its slow part
        body = "at::vec::Vectorized<float>(1).exp().store(to);" if instruction_set() else "*to = std::exp(1.0f);"
        source = f'#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* to) {{ {body} }}'
        try:
            build_library(library_source([("kernel_0", CppKernel(("float*",), source))]))()
        except Exception as error:
            fix = "set ATEN_CPU_CAPABILITY=avx2 or default in the environment for a smaller instruction set"
            raise RuntimeError(f"the C++ compiler cannot build for {instruction_set()}; {fix}: {error}") from error


def whole_files_only() -> AbstractContextManager[None]:
    """Let Inductor execute only unchanged files of its cache, and note the digests of files that it builds."""
    return execute_only(lambda path: notes_of(path).is_as_noted(path), lambda path: notes_of(path).note(path), replace)


checked_files, trusted_instructions = Shared(whole_files_only), Shared(instructions_untested)


def notes_of(path: Path) -> Store:
    """Return the store of a file's digest: next to a file that all caches share, as precompiled headers are."""
    return body_store() if path.is_relative_to(compiler_folder()) else Store(path.parent / "digests")
