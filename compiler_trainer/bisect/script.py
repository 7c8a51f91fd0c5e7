"""A piece as Python text: a script that rebuilds it, applies the pass and exits with the result."""

from __future__ import annotations

import inspect
import math
import operator
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import fx

from compiler_trainer.bisect.piece import Piece, gist
from passes.ir import ir
from passes.ir.operators import namespace_of
from passes.rules import ADDED
from passes.torch_private import OpOverload

NAMESPACES = ("aten", "prims", "ct", "_c10d_functional")  # of operators of PyTorch and ours


class Inexpressible(Exception):
    """A piece that cannot be written as text: a script has no function, operator or rule of the user's."""


def write(piece: Piece, path: Path, about: str) -> None:
    """Write the script, and its values next to it as `.pt`; raise Inexpressible, with nothing written."""
    text = script(piece, about)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(piece.values), path.with_suffix(".pt"))
    path.write_text(text, encoding="utf-8")


def script(piece: Piece, about: str) -> str:
    """Return Python that rebuilds the piece, applies the pass, and exits with the result; raise Inexpressible."""
    text = Text()
    sketch = piece.sketch
    body = [f"sketch = Sketch({text.of(sketch.mesh)}, {text.of(sketch.stage)})"]
    ends = iter(sketch.inputs)
    for node in sketch.graph.nodes:
        if node.op == "placeholder":
            program_input = next(ends)
            words: tuple = (
                node.name,
                program_input.name,
                program_input.kind,
                program_input.spec,
                ir.example(node).dtype,
            )
            body.append(f"{node.name} = sketch.input({', '.join(map(text.of, words))})")
        else:
            words = (node.name, node.target, node.args, dict(node.kwargs))
            attributes: dict[str, Any] = {"source": ir.source(node), "module": ir.module_path(node)}
            attributes |= {"spec": ir.spec(node), "layer": ir.layer(node), "role": ir.record(node).role}
            keywords = [f", {key}={text.of(value)}" for key, value in attributes.items() if value]
            keywords += [f", phase={text.of(ir.phase(node))}"] if ir.phase(node) != "forward" else []
            body.append(f"{node.name} = sketch.call({', '.join(map(text.of, words))}{''.join(keywords)})")
    for output, result in zip(sketch.outputs, sketch.results, strict=True):
        words = (output.name, output.kind, output.spec, result)
        body.append(f"sketch.output({', '.join(map(text.of, words))})")
    step = text.of(piece.step)
    imports = sorted({*text.imports, "from compiler_trainer.bisect.piece import Sketch, run"})
    head = ["import operator", "import sys", "from pathlib import Path", "", "import torch", "", *imports]
    gist_argument = f", {gist(piece.message)!r}" if piece.kind == "crash" else ""
    tail = [f'sys.exit(run(sketch, {step}, Path(__file__).with_suffix(".pt"), {piece.kind!r}{gist_argument}))']
    doc = f'"""{about}\n\nExits with 1 while this is so, with 0 once it is mended.\n"""'
    return "\n".join([doc, "", *head, "", *body, *tail]) + "\n"


class Text:
    """Python expressions for values, and their imports."""

    def __init__(self) -> None:
        self.imports: set[str] = set()

    def of(self, value: Any) -> str:
        """Return the expression of a value; raise Inexpressible."""
        if isinstance(value, fx.Node):
            return value.name
        if isinstance(value, OpOverload) or value is operator.getitem:
            return self.of_target(value)
        if is_dataclass(value) and not isinstance(value, type):
            return self.of_dataclass(value)
        if isinstance(value, Enum):
            self.imports.add(f"from {type(value).__module__} import {type(value).__qualname__}")
            return f"{type(value).__name__}.{value.name}"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.of(k)}: {self.of(v)}" for k, v in value.items()) + "}"
        if isinstance(value, tuple):
            return f"({', '.join(map(self.of, value))}{',' * (len(value) == 1)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self.of, value))}]"
        if isinstance(value, frozenset):
            return f"frozenset({self.of(sorted(value))})"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(
            value, (bool, int, float, str, slice, torch.dtype, torch.layout, torch.memory_format)
        ):
            return repr(value)
        if inspect.ismethod(value):
            return f"{self.of(value.__self__)}.{value.__name__}"
        raise Inexpressible(f"{value!r} has no text")

    def of_target(self, target: Any) -> str:
        """Return the expression of an operator."""
        if target is operator.getitem:
            return "operator.getitem"
        if namespace_of(target) in ("fn", "local"):
            raise Inexpressible(f"{target} is a function of the process that captured the model")
        if target._schema.name in ADDED or target.namespace not in NAMESPACES:
            raise Inexpressible(f"{target}, or its rule, is of a module that a script does not import")
        return f"torch.ops.{target.namespace}.{target._opname}.{target._overloadname}"

    def of_dataclass(self, value: Any) -> str:
        """Return a constructor call with the fields that differ from their defaults; functions keep their defaults."""
        cls = type(value)
        self.imports.add(f"from {cls.__module__} import {cls.__qualname__}")
        options = [f for f in fields(cls) if f.init and not is_default(f, getattr(value, f.name))]
        return f"{cls.__name__}({', '.join(f'{f.name}={self.of(getattr(value, f.name))}' for f in options)})"


def is_default(option: Field, value: Any) -> bool:
    """Return True if a field need not be written."""
    if inspect.isfunction(value):
        return option.default is not MISSING
    if option.default_factory is not MISSING:
        return value == option.default_factory()
    return option.default is not MISSING and type(value) is type(option.default) and value == option.default
