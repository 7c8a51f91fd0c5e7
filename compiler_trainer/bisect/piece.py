"""A small program and a pass that fails on it: the contents of a repro script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from passes.check.composed import verify_composed
from passes.check.numeric import coarsest, compare
from passes.check.numeric import run as run_program
from passes.check.runner import apply_pass
from passes.check.verify import verify_spec
from passes.ir import ir
from passes.ir.layer import Layer, Role
from passes.ir.mesh import Mesh
from passes.ir.record import Origin
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.torch_private import FakeTensorMode

Kind = Literal["", "crash", "differs", "illegal"]


class Sketch:
    """A program written node by node; values are computed on fake tensors."""

    def __init__(self, mesh: Mesh, stage: Stage):
        self.mesh, self.stage = mesh, stage
        self.ctx, self.graph = ir.Context(FakeTensorMode()), fx.Graph()
        self.inputs: list[ir.Input] = []
        self.outputs: list[ir.Output] = []
        self.results: list[fx.Node] = []

    def input(self, node_name: str, name: str, kind: ir.InputKind, spec: Spec, dtype: torch.dtype) -> fx.Node:
        """Add a placeholder: a full tensor unless the program is local."""
        shape = spec.local_shape(self.mesh) if self.stage >= Stage.LOCAL else spec.shape
        first = next((n for n in self.graph.nodes if n.op != "placeholder"), None)
        with self.graph.inserting_before(first) if first is not None else nullcontext():
            node = self.graph.create_node("placeholder", node_name, name=node_name)
        with self.ctx.fake_mode:
            ir.update(node, value=torch.empty(shape, dtype=dtype), spec=spec if self.stage >= Stage.LOCAL else None)
        self.inputs.append(ir.Input(name, kind, spec))
        return node

    def call(
        self,
        name: str,
        target: Any,
        args: tuple,
        kwargs: dict[str, Any] | None = None,
        *,
        spec: Spec | None = None,
        source: str = "",
        module: str = "",
        phase: str = "forward",
        layer: Layer | None = None,
        role: Role | None = None,
    ) -> fx.Node:
        """Add an operator."""
        node = self.graph.create_node("call_function", target, args, kwargs or {}, name)
        values, named = fx.map_arg((args, kwargs or {}), ir.value)
        with self.ctx.fake_mode, torch.no_grad():
            ir.set_value(node, target(*values, **named))
        origin = Origin(source, (module,) if module else ())
        ir.update(node, spec=spec, origin=origin, phase=phase, layer=layer, role=role)
        return node

    def output(self, name: str, kind: ir.OutputKind, spec: Spec, node: fx.Node) -> None:
        """Add a result."""
        self.outputs.append(ir.Output(name, kind, spec))
        self.results.append(node)

    def program(self) -> ir.Program:
        """Return the program that returns the results."""
        graph = fx.Graph()
        graph.graph_copy(self.graph, nodes := dict[fx.Node, fx.Node]())
        graph.output(tuple(nodes[result] for result in self.results))
        module = fx.GraphModule(nn.Module(), graph)
        return ir.Program(module, tuple(self.inputs), tuple(self.outputs), self.mesh, self.stage)


@dataclass(frozen=True)
class Piece:
    """A program, a pass, full values of its inputs by name, and the kind of its failure (empty if it is right)."""

    sketch: Sketch
    step: ir.Pass
    values: Mapping[str, Tensor]
    kind: Kind
    message: str


def check(sketch: Sketch, step: ir.Pass, values: Mapping[str, Tensor]) -> tuple[Kind, str]:
    """Return the kind and message of a pass's failure on a program; two empty strings if it is right."""
    program = sketch.program()
    kind: Kind = "crash"
    try:
        after, _ = apply_pass(step, program, sketch.ctx)
        after = verify_composed(step.name, program, after)
        before, results = (run_program(p, sketch.ctx, values) for p in (program, after))
        kind = "differs"
        compare(step.name, before, results, max(coarsest(program), coarsest(after)) ** 0.5)
        kind = "illegal"
        verify_spec(after, sketch.ctx, pass_name=step.name)
    except ir.CompileError as error:
        return kind, str(error)
    return "", ""


def run(sketch: Sketch, step: ir.Pass, values: Path, wrong: Kind, expected_gist: str = "") -> int:
    """Check a pass for a script and print the result; return the exit code 1 if it still fails in this way.

    For a crash, `expected_gist` is the gist of its message, because a piece may be refused for another reason once the
    crash is fixed.
    """
    kind, message = check(sketch, step, torch.load(values, weights_only=True))
    print(f"{kind}: {message}" if kind else f"{step.name}: right")
    return int(kind == wrong and expected_gist in ("", gist(message)))


def gist(message: str) -> str:
    """Return the first line of an error without names, places and numbers."""
    return re.sub(r"%\w+|\([^)]*\)|\d+", "", message.partition("\n")[0]).strip()
