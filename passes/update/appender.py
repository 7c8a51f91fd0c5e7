"""Append an update to a graph: traced functions, writes in place, new inputs."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.bodies import base_of
from passes.ir.spec import Spec
from passes.trace.editor import Editor

aten = torch.ops.aten
EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


class Appender(Editor):
    """Inserts the updates of parameters into a program, one after another, by default before its output."""

    def __init__(self, program: ir.Program, ctx: ir.Context, phase: str):
        super().__init__(ctx, program.graph, program.graph.output_node())
        self.phase = phase
        self.last = program.placeholders()[-1]
        self.layers = {item.name: item.layer for item in program.inputs}
        self.parameter = ""  # the parameter whose update is being appended
        self.guard: fx.Node | None = None  # bool, 0-d: if it is False, stored values stay unchanged

    def mark(self, node: fx.Node) -> None:
        """Record a node's origin."""
        ir.update(node, phase=self.phase, parameter=self.parameter, layer=self.layers.get(self.parameter))

    def keep(self, target: fx.Node, new: fx.Node) -> None:
        """Store a value into an input that outlives the step, in place, if the guard is True."""
        if self.guard is not None:
            new = self.trace(keep_if, self.guard, new, target, key="keep")
        self.write(target, new)

    def write(self, target: fx.Node, new: fx.Node) -> None:
        """Store a value into an input, in place."""
        self.call(aten.copy_.default, (target, new))

    def placeholder(self, name: str, val: Tensor, spec: Spec) -> fx.Node:
        """Insert an input after the others."""
        with self.graph.inserting_after(self.last):
            node = self.last = self.graph.placeholder(name)
        ir.update(node, value=val, spec=spec)
        return node


def copy_stored_results(program: ir.Program, append: Appender) -> None:
    """Let outputs that are views of inputs, such as a buffer copied from another, return copies made before updates."""
    results = []
    for node, output in zip(program.results(), program.outputs, strict=True):
        base = base_of(node) if isinstance(node, fx.Node) else node
        if output.kind != "gradient" and isinstance(base, fx.Node) and base.op == "placeholder":
            copy = append.trace(torch.clone, node, key="copy")
            ir.set_spec(copy, ir.spec(node))
            node = copy
        results.append(node)
    program.graph.output_node().args = (tuple(results),)


def keep_if(guard: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """Return `new` if the guard is True, otherwise `old`, in the dtype of `old`."""
    new = new if new.dtype == old.dtype else new.to(old.dtype)
    if old.dtype in EIGHT_BIT_FLOATS:  # `where` does not support these
        return torch.where(guard, new.view(torch.uint8), old.view(torch.uint8)).view(old.dtype)
    return torch.where(guard, new, old)


def coordinates_of(program: ir.Program, append: Appender) -> tuple[dict[str, fx.Node], list[tuple[fx.Node, ir.Input]]]:
    """Return the rank's coordinate on every axis, and the coordinates that were added to the inputs."""
    inputs = zip(program.placeholders(), program.inputs)
    coordinates = {i.name: n for n, i in inputs if i.kind == "coordinate"}
    added = []
    for axis in program.mesh.names:
        if axis not in coordinates:
            device = ir.example(program.placeholders()[0]).device
            with append.ctx.fake_mode:
                val = torch.zeros((), dtype=torch.int64, device=device)
            spec = Spec((), replicate=program.mesh.over(axis))
            coordinates[axis] = append.placeholder(f"axis_index_{axis}", val, spec)
            added.append((coordinates[axis], ir.Input(axis, "coordinate", spec)))
    return coordinates, added
