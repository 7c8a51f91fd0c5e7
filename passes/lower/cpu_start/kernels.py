"""Build several C++ kernels at a time: a library costs the compiler half a second, one more kernel in it little.

Kernels that Inductor asks for, for any body, are written into one source, each in its own namespace. The store knows a
library by its source, and a kernel by its own source and the compiler's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from passes.ir.bodies import key_of
from passes.lower.store import Store
from passes.torch_private import binding_of, build_library

TOGETHER = 8  # kernels of a library; more would leave cores idle
HEADERS = tuple(f"#include {file}" for file in ("<Python.h>", "<sstream>", "<cstdlib>", "<cerrno>"))  # for bindings
Load = Callable[[], Any]  # waits for a build, and returns the loaded library or kernel


@dataclass(frozen=True)
class CppKernel:
    """A C++ function `kernel` in a source, and the types of its arguments."""

    argtypes: tuple[str, ...]
    source: str

    def with_name(self, name: str) -> str:
        """Return the function under another name, with its binding, in a namespace, without its includes."""
        lines = "\n".join(line for line in self.source.splitlines() if not is_include(line))
        binding = binding_of(name, self.argtypes)
        return f"namespace of_{name} {{\n#define kernel {name}\n{lines}\n{binding}\n#undef kernel\n}}"


@dataclass
class Libraries:
    """The libraries of kernels, in this process and in the store.

    `surroundings` is everything that kernels depend on except their source. `waiting` are kernels that are in no
    library yet.
    """

    store: Store
    surroundings: str
    waiting: dict[str, CppKernel] = field(default_factory=dict)
    libraries: dict[str, Load] = field(default_factory=dict)
    places: dict[str, tuple[str, str]] = field(default_factory=dict)  # kernel -> its library, and its name in it

    def ask(self, argtypes: Sequence[str], source: str) -> Load:
        """Return the loader of a kernel, to be called once all are built."""
        kernel = CppKernel(tuple(argtypes), source)
        key = self.key(kernel)
        if key not in self.places and key not in self.waiting and not self.find_stored(key):
            self.waiting[key] = kernel
            if len(self.waiting) == TOGETHER:
                self.build()
        return lambda: self.load(*self.places[key])

    def load(self, library: str, name: str) -> Any:
        """Return a kernel of a library, which has one module for each kernel."""
        return getattr(getattr(self.libraries[library](), name), name)

    def key(self, kernel: CppKernel) -> str:
        """Return the key of a kernel in the store."""
        return key_of(f"{kernel.argtypes} {kernel.source} {self.surroundings}")

    def place_of(self, kernel: tuple[tuple[str, ...], str]) -> tuple[str, str] | None:
        """Return the file of the library from which a kernel was loaded, and its name in it, or None."""
        library, name = self.places.get(self.key(CppKernel(*kernel)), ("", ""))
        return (self.libraries[library]().__file__, name) if library else None

    def find_stored(self, key: str) -> bool:
        """Return True if the store has a library with the kernel; start to load it."""
        entry = self.store.get(key)
        library, _, name = entry.decode().partition(" ") if entry else ("", "", "")
        source = self.store.get(library) if library and library not in self.libraries else None
        if source is not None:
            self.libraries[library] = build_library(source.decode())
        if library in self.libraries:
            self.places[key] = library, name
        return key in self.places

    def build(self) -> None:
        """Start to build a library of the waiting kernels."""
        if not self.waiting:
            return
        names = {key: f"kernel_{i}" for i, key in enumerate(self.waiting)}
        source = library_source([(names[key], kernel) for key, kernel in self.waiting.items()])
        library = key_of(source)
        self.libraries[library] = build_library(source)
        self.store.put(library, source.encode())
        for key, name in names.items():
            self.places[key] = library, name
            self.store.put(key, f"{library} {name}".encode())
        self.waiting.clear()


def is_include(line: str) -> bool:
    """Return True if a line of C++ includes a file."""
    return line.lstrip().startswith("#include")


def library_source(kernels: Sequence[tuple[str, CppKernel]]) -> str:
    """Return the source of a module with one submodule for each named kernel."""
    includes = (line.strip() for _, kernel in kernels for line in kernel.source.splitlines() if is_include(line))
    # the compiler uses the precompiled header only if its include comes first
    head = "\n".join(dict.fromkeys([*includes, "#define PY_SSIZE_T_CLEAN", *HEADERS]))
    parts = "\n".join(kernel.with_name(name) for name, kernel in kernels)
    adds = "\n".join(f'    add(all, "{name}", of_{name}::PyInit_{name}());' for name, _ in kernels)
    return f"""{head}
{parts}
static struct PyModuleDef all_kernels = {{PyModuleDef_HEAD_INIT, "kernels", NULL, -1, NULL}};
static void add(PyObject* all, const char* name, PyObject* one) {{
    if (one != NULL && PyModule_AddObject(all, name, one) < 0) Py_DECREF(one);
}}
PyMODINIT_FUNC PyInit_kernels(void) {{
    PyObject* all = PyModule_Create(&all_kernels);
    if (all == NULL) return NULL;
{adds}
    if (!PyErr_Occurred()) return all;
    Py_DECREF(all);
    return NULL;
}}
"""
