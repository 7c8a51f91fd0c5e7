"""Compiled bodies that a restart loads without Inductor, whose import takes two seconds.

A compiled body on the CPU is Python code that calls kernels of libraries. If the code needs nothing else of Inductor,
it is stored without Inductor's statements and with the places of its kernels. The key covers the body, our passes,
versions, the environment, the processor, and Inductor's options, as they are before and after its import.
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

from passes.ir.bodies import Body, key_of
from passes.lower.store import Store
from passes.torch_private import inductor_options, load_library

Kernel = tuple[tuple[str, ...], str]  # the types of its arguments, and its source
UNTOUCHED = "as the environment says"  # Inductor's options before they are imported
VARIABLES = ("TORCH", "PYTORCH", "ATEN", "OMP", "MKL", "KMP", "CXX", "CC", "CFLAGS", "CXXFLAGS", "TRITON")
NO_MATTER = (
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHELASTIC", "TORCH_TRACE", "TORCH_LOGS", "TORCH_NCCL",
    "OMP_NUM_THREADS",
)  # fmt: skip


@dataclass
class Ready:
    """The bodies of a store that can be loaded without Inductor; `options` are Inductor's current options."""

    store: Store
    ours: str
    options: str = field(default_factory=lambda: options_now())
    libraries: dict[str, ModuleType] = field(default_factory=dict)

    def key(self, body: Body, options: str) -> str:
        """Return the key of a body."""
        return key_of(f"ready {body.key} {self.ours} {options} {machine()} {settings_now()}")

    def load(self, body: Body) -> Callable | None:
        """Return the function that runs a body; None if it is not stored, or one of its libraries was changed."""
        entry = self.store.get(self.key(body, self.options))
        if entry is None:
            return None
        saved = json.loads(entry)
        if not all(self.open(path) for path in saved["libraries"]):
            return None
        names = {name: self.kernel(*place) for name, place in saved["kernels"].items()}
        exec(compile(saved["code"], f"<{body.name}>", "exec"), names)
        return names["call"]  # type: ignore[return-value]

    def open(self, path: str) -> bool:
        """Load a library unless it was changed since it was built; return False if it was."""
        if path not in self.libraries:
            if not self.store.is_as_noted(Path(path)):
                return False
            self.libraries[path] = load_library(path)
        return True

    def kernel(self, path: str, name: str) -> Any:
        """Return a kernel of a library."""
        return getattr(getattr(self.libraries[path], name), name)

    def keep(self, body: Body, source: str, place: Callable[[Kernel], tuple[str, str] | None]) -> None:
        """Store the code of a body if it needs no compiler; `place` returns the library and the name of a kernel."""
        parts = without_compiler(source)
        if parts is None:
            return
        code, kernels = parts
        places = {name: place(kernel) for name, kernel in kernels.items()}
        if None in places.values():
            return
        libraries = sorted({at[0] for at in places.values() if at})
        entry = json.dumps({"code": code, "kernels": places, "libraries": libraries}).encode()
        now = options_now()
        for options in {now, UNTOUCHED} if options_untouched() and now == options_at_import() else {now}:
            self.store.put(self.key(body, options), entry)


def without_compiler(source: str) -> tuple[str, dict[str, Kernel]] | None:
    """Return a body's code and its kernels; None if the code needs more of Inductor than its loader."""
    statements, kernels = [], dict[str, Kernel]()
    for statement in ast.parse(source.partition("\ndef get_args(")[0]).body:
        if kernel := kernel_in(statement):
            kernels[kernel[0]] = kernel[1]
        elif not is_of_compiler(statement):
            statements.append(statement)
    code = ast.unparse(ast.Module(statements, []))
    names = {node.id for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Name)}
    if "torch._inductor" in code or "torch._dynamo" in code or names & {"async_compile", *LOADED_BY}:
        return None
    return code, kernels


LOADED_BY = ("AsyncCompile", "run_intermediate_hooks", "maybe_profile", "align")  # imported by generated code


def is_of_compiler(statement: ast.stmt) -> bool:
    """Return True if a statement only serves Inductor's loader."""
    if isinstance(statement, ast.ImportFrom):
        names = {alias.asname or alias.name for alias in statement.names}
        return (statement.module or "").startswith("torch._inductor") and names <= set(LOADED_BY)
    if isinstance(statement, ast.Assign | ast.Delete):
        targets = {target.id for target in statement.targets if isinstance(target, ast.Name)}
        return targets == {"async_compile"}
    return ast.unparse(statement) == "async_compile.wait(globals())"


def kernel_in(statement: ast.stmt) -> tuple[str, Kernel] | None:
    """Return the kernel in `name = async_compile.cpp_pybinding(types, source)`; None for other statements."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    call, target = statement.value, statement.targets[0]
    if ast.unparse(call.func) != "async_compile.cpp_pybinding" or not isinstance(target, ast.Name) or call.keywords:
        return None
    argtypes, source = map(ast.literal_eval, call.args)
    return target.id, (tuple(argtypes), source)


def options_now() -> str:
    """Return Inductor's options, or `UNTOUCHED` if they are not imported yet."""
    return inductor_options() if "torch._inductor.config" in sys.modules else UNTOUCHED


def settings_now() -> str:
    """Return the current settings of PyTorch that kernels depend on, except Inductor's options."""
    flags = torch.are_deterministic_algorithms_enabled(), torch.backends.mkldnn.enabled
    return f"{torch.get_num_threads()} {flags} {torch.get_float32_matmul_precision()}"


@functools.cache
def options_untouched() -> bool:
    """Return True if Inductor's options were not imported at the first call, which comes before we import them."""
    return options_now() == UNTOUCHED


@functools.cache
def options_at_import() -> str:
    """Return Inductor's options at the first call, which comes right after we import them."""
    return options_now()


@functools.cache
def machine() -> str:
    """Return versions, the processor, and the variables that compilers read."""
    read = {k: v for k, v in os.environ.items() if k.startswith(VARIABLES) and not k.startswith(NO_MATTER)}
    versions = sys.version, torch.__version__, torch.version.git_version, platform.platform()
    return f"{versions} {torch.backends.cpu.get_cpu_capability()} {processor()} {sorted(read.items())}"


def processor() -> str:
    """Return the features of the processor, as Linux lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
