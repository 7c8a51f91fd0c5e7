"""Compiled bodies that a restart loads without the compiler, which takes seconds to import.

A body on the CPU is Python code that calls kernels of libraries. Where the code needs nothing else of Inductor, it is
stored without what is for Inductor alone, with the places of its kernels. It is known by the body, by our passes, by
versions, the environment and the processor, and by Inductor's options, as they are before and after its import.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from passes.lower.fast_start import load_library
from passes.lower.store import Store
from passes.program.bodies import Body, key_of
from passes.program.torch_private import inductor_options

Kernel = tuple[tuple[str, ...], str]  # the types of its arguments, and its source
UNTOUCHED = "as the environment says"  # Inductor's options before anybody imports them
VARIABLES = ("TORCH", "PYTORCH", "ATEN", "OMP", "MKL", "KMP", "CXX", "CC", "CFLAGS", "CXXFLAGS", "TRITON")
NO_MATTER = (
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHELASTIC", "TORCH_TRACE", "TORCH_LOGS", "TORCH_NCCL",
    "OMP_NUM_THREADS",
)  # fmt: skip


@dataclass
class Ready:
    """The bodies of a store that can be loaded so; `options` are Inductor's now."""

    store: Store
    ours: str
    options: str = field(default_factory=lambda: options_now())
    libraries: dict[str, ModuleType] = field(default_factory=dict)

    def key(self, body: Body, options: str) -> str:
        """What a body is known by."""
        return key_of(f"ready {body.key} {self.ours} {options} {machine()} {switched()}")

    def load(self, body: Body) -> Callable | None:
        """What runs a body, None if it is not stored, or one of its libraries is not as it was built."""
        entry = self.store.get(self.key(body, self.options))
        if entry is None:
            return None
        found = json.loads(entry)
        if not all(self.open(path) for path in found["libraries"]):
            return None
        names = {name: self.kernel(*place) for name, place in found["kernels"].items()}
        exec(compile(found["code"], f"<{body.name}>", "exec"), names)
        return names["call"]  # type: ignore[return-value]

    def open(self, path: str) -> bool:
        """Load a library, if it is as it was built."""
        if path not in self.libraries:
            if not self.store.is_as_noted(Path(path)):
                return False
            self.libraries[path] = load_library(path)
        return True

    def kernel(self, path: str, name: str) -> Any:
        """A kernel of a library."""
        return getattr(getattr(self.libraries[path], name), name)

    def keep(self, body: Body, source: str, place: Callable[[Kernel], tuple[str, str] | None]) -> None:
        """Store the code of a body, if it needs no compiler; `place` gives the library and the name of a kernel."""
        found = without_compiler(source)
        if found is None:
            return
        code, kernels = found
        places = {name: place(kernel) for name, kernel in kernels.items()}
        if None in places.values():
            return
        libraries = sorted({at[0] for at in places.values() if at})
        entry = json.dumps({"code": code, "kernels": places, "libraries": libraries}).encode()
        now = options_now()
        for options in {now, UNTOUCHED} if untouched() and now == as_imported() else {now}:
            self.store.put(self.key(body, options), entry)


def without_compiler(source: str) -> tuple[str, dict[str, Kernel]] | None:
    """A body's code and its kernels, None where the code needs more of Inductor than it is loaded by."""
    kept, kernels = [], dict[str, Kernel]()
    for statement in ast.parse(source.partition("\ndef get_args(")[0]).body:
        if kernel := kernel_in(statement):
            kernels[kernel[0]] = kernel[1]
        elif not is_of_compiler(statement):
            kept.append(statement)
    code = ast.unparse(ast.Module(kept, []))
    names = {node.id for statement in kept for node in ast.walk(statement) if isinstance(node, ast.Name)}
    if "torch._inductor" in code or "torch._dynamo" in code or names & {"async_compile", *LOADED_BY}:
        return None
    return code, kernels


LOADED_BY = ("AsyncCompile", "run_intermediate_hooks", "maybe_profile", "align")  # what generated code imports


def is_of_compiler(statement: ast.stmt) -> bool:
    """Whether a statement is there for Inductor to load the code by."""
    if isinstance(statement, ast.ImportFrom):
        names = {alias.asname or alias.name for alias in statement.names}
        return (statement.module or "").startswith("torch._inductor") and names <= set(LOADED_BY)
    if isinstance(statement, ast.Assign | ast.Delete):
        targets = {target.id for target in statement.targets if isinstance(target, ast.Name)}
        return targets == {"async_compile"}
    return ast.unparse(statement) == "async_compile.wait(globals())"


def kernel_in(statement: ast.stmt) -> tuple[str, Kernel] | None:
    """The kernel that a statement `name = async_compile.cpp_pybinding(types, source)` asks for."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    call, target = statement.value, statement.targets[0]
    if ast.unparse(call.func) != "async_compile.cpp_pybinding" or not isinstance(target, ast.Name) or call.keywords:
        return None
    argtypes, source = map(ast.literal_eval, call.args)
    return target.id, (tuple(argtypes), source)


def options_now() -> str:
    """Inductor's options: imported by nobody, they are as the environment says."""
    return inductor_options() if "torch._inductor.config" in sys.modules else UNTOUCHED


def switched() -> str:
    """What is switched in PyTorch, as it is now, that kernels depend on beside Inductor's options."""
    flags = torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled
    return f"{torch.get_num_threads()} {flags} {torch.get_float32_matmul_precision()}"


@functools.cache
def untouched() -> bool:
    """Whether nobody had imported Inductor's options when this was first asked, which is before we do."""
    return options_now() == UNTOUCHED


@functools.cache
def as_imported() -> str:
    """Inductor's options when this was first asked, which is as soon as we import them."""
    return options_now()


@functools.cache
def machine() -> str:
    """Versions, the processor, and variables that compilers read."""
    read = {k: v for k, v in os.environ.items() if k.startswith(VARIABLES) and not k.startswith(NO_MATTER)}
    versions = sys.version, torch.__version__, torch.version.git_version, platform.platform()
    return f"{versions} {torch.backends.cpu.get_cpu_capability()} {processor()} {sorted(read.items())}"


def processor() -> str:
    """What the processor can do, as Linux says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
