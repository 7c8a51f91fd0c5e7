"""What is for the CPU's cold start alone: C++ kernels built several at a time, beside capture, without a look around.

All of it is private to PyTorch, and nothing depends on it but time: `lower.fast_start=false` leaves it out, and a
PyTorch that has changed so that it fails is used as it is (`inductor.made`).
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from passes.program.signals import undisturbed
from passes.program.torch_private import VERSION

LOWERING = "from torch._inductor.select_algorithm import extern_kernels"


def import_loader() -> None:
    """Import what loads kernels: Dynamo and Inductor import each other in circles, which fails in two threads at once.

    What lowers comes later: when the instruction set is known, `build_cpp_header` imports nothing more of them.
    """
    import torch._dynamo
    import torch._inductor.async_compile
    import torch._inductor.output_code
    import torch.utils.cpp_extension  # noqa: F401  # by what builds; with AVX-512, by tests of it before


def choose_instruction_set() -> None:
    """Let C++ kernels be built for the best instruction set that the processor has and the compiler knows.

    By itself Inductor builds a test, seconds each, for every set of the processor, to take the best of those that pass.
    """
    from torch._inductor import config, cpu_vec_isa

    if config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ:
        return  # a choice of the user's, for Inductor to make
    has, trusted = set(cpu_vec_isa.x86_isa_checker()), {"cpp.vec_isa_ok": config.cpp.vec_isa_ok is not False}
    with config.patch(trusted):  # of the tests only the small ones: is each extension known
        known = (each for each in cpu_vec_isa.supported_vec_isa_list if set(str(each).split()) <= has and each)
        with patch.object(cpu_vec_isa, "supported_vec_isa_list", list(itertools.islice(known, 1))):
            cpu_vec_isa.valid_vec_isa_list()  # remembers its answer


def forget_instruction_set() -> None:
    """Let Inductor choose by itself."""
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list.cache_clear()


def build_cpp_header() -> None:
    """Precompile what every C++ kernel includes; raises RuntimeError if kernels cannot be built or loaded."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    body = "at::vec::Vectorized<float>(1).exp().store(to);" if pick_vec_isa() else "*to = std::exp(1.0f);"
    source = f'#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* to) {{ {body} }}'
    compiling = AsyncCompile()
    try:
        compiling.wait({"kernel": compiling.cpp_pybinding(["float*"], source)})
    except Exception as error:
        lesser = "ATEN_CPU_CAPABILITY=avx2 or default in the environment chooses a lesser instruction set"
        raise RuntimeError(f"the C++ compiler builds nothing for {pick_vec_isa()}; {lesser}: {error}") from error


@contextmanager
def kernels_later(ask: Callable[[list[str], str], Callable[[], Any]], build: Callable[[], None]) -> Iterator[None]:
    """While on, C++ kernels of what is compiled or loaded are asked for; then the last are built, and all are there.

    `ask` is given the types of a kernel's arguments and its source, and says how to get it when all are built.
    """
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import LambdaFuture

    waiting: list[tuple[AsyncCompile, dict[str, Any]]] = []
    wait = AsyncCompile.wait

    def later(self: AsyncCompile, scope: dict[str, Any]) -> None:
        waiting.append((self, scope))

    def asked(self: AsyncCompile, argtypes: list[str], source: str) -> Any:
        return LambdaFuture(ask(argtypes, source))

    with patch.object(AsyncCompile, "wait", later), patch.object(AsyncCompile, "cpp_pybinding", asked):
        yield
    build()
    for each, scope in waiting:
        wait(each, scope)


def build_library(source: str) -> Callable[[], Any]:
    """Begin to build C++ of a Python module `kernels`, if it is not built; what waits for it and loads it."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    class Library(CppPythonBindingsCodeCache):
        entry_function = "kernels"

    # in a thread from the start, for the header may still be on its way; loaded by the thread that waits. Flags are
    # those of vectors even where a library has none: the header was precompiled with them.
    pool = AsyncCompile.pool()

    def submit(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return pool.submit(undisturbed(work), *args, **kwargs)

    vectors = {"needs_vec_isa": True} if VERSION >= (2, 13) else {}  # as all have before
    begun = submit(Library.load_async, source, submit_fn=submit, **vectors)
    return lambda: begun.result()()


def binding_of(name: str, argtypes: Sequence[str]) -> str:
    """C++ that lets Python call a function `kernel`, which a macro calls `name`; it includes headers of Python's."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Bindings

    types = (argtype.replace("const ", "") for argtype in argtypes)
    given = ", ".join(f"parse_arg<{argtype}>(args, {n})" for n, argtype in enumerate(types))
    call = Bindings.call_entry_function.format(given)
    return Bindings.suffix_template.format(
        arg_len=len(argtypes), call_entry_func=call, entry_func=name, extra_parse_arg=Bindings.extra_parse_arg
    )


def load_library(path: str) -> ModuleType:
    """A library of kernels, `kernels`, that Inductor built."""
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    )
    spec = importlib.util.spec_from_file_location(f"{Path(path).stem}.kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_lowering(source: str) -> str:
    """A body's code that takes the kernels it calls from `torch`, where they are the very functions found there.

    Inductor's own namespace of them is filled by all of its lowering, which takes a second to import.
    """
    if LOWERING not in source:
        return source
    from torch._inductor.select_algorithm import extern_kernels

    called = set(re.findall(r"\bextern_kernels\.(\w+)", source))
    if any(getattr(torch, name, None) is not getattr(extern_kernels, name) for name in called):
        return source
    return source.replace(LOWERING, "import torch as extern_kernels")
