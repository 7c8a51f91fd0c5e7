"""What an update is appended to a graph with: traced functions, writes in place, inputs that were not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from passes.program import ir
from passes.program.rewrite import Editor
from passes.program.spec import Spec

aten = torch.ops.aten
EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


class Appender:
    """Appends traced functions to a graph, by default before its output; a function is traced once a signature."""

    def __init__(self, program: ir.Program, ctx: ir.Context, phase: str):
        self.graph, self.ctx, self.phase = program.graph, ctx, phase
        self.last = program.placeholders()[-1]
        self.editor = Editor(ctx)
        self.layers = {given.name: given.layer for given in program.inputs}
        self.parameter = ""  # whose update is being appended
        self.before = program.graph.output_node()  # what is appended comes before it
        self.guard: fx.Node | None = None  # bool, 0-d: where it is false, what is kept stays as it was

    def call(self, key: Any, fn: Callable[..., Any], *inputs: fx.Node) -> Any:
        """The result of `fn` on the nodes' values; `key` tells functions of the same input shapes apart."""
        return self.editor.put(self.before, key, fn, inputs, self.mark)

    def mark(self, node: fx.Node) -> None:
        """Say where a node comes from."""
        ir.update(node, phase=self.phase, parameter=self.parameter, layer=self.layers.get(self.parameter))

    def keep(self, target: fx.Node, new: fx.Node) -> None:
        """Store a value into an input that outlives the step, in place, if the guard lets it."""
        if self.guard is not None:
            new = self.call("keep", keep_if, self.guard, new, target)
        self.write(target, new)

    def write(self, target: fx.Node, new: fx.Node) -> None:
        """Store a value into an input, in place."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(aten.copy_.default, (target, new))
        ir.set_value(node, ir.example(target))
        self.mark(node)

    def placeholder(self, name: str, val: Tensor, spec: Spec) -> fx.Node:
        """A new input, after the others."""
        with self.graph.inserting_after(self.last):
            node = self.last = self.graph.placeholder(name)
        ir.update(node, value=val, spec=spec)
        return node


def keep_if(guard: Tensor, new: Tensor, old: Tensor) -> Tensor:
    """`new` where the guard is true, else `old`, whose dtype it gets."""
    new = new if new.dtype == old.dtype else new.to(old.dtype)
    if old.dtype in EIGHT_BIT_FLOATS:  # which no `where` takes
        return torch.where(guard, new.view(torch.uint8), old.view(torch.uint8)).view(old.dtype)
    return torch.where(guard, new, old)


def coordinates_of(program: ir.Program, append: Appender) -> tuple[dict[str, fx.Node], list[tuple[fx.Node, ir.Input]]]:
    """The rank's coordinate on every axis, and those of them that had to be added to the inputs."""
    given = zip(program.placeholders(), program.inputs)
    found = {i.name: n for n, i in given if i.kind == "coordinate"}
    added = []
    for axis in program.mesh.names:
        if axis not in found:
            device = ir.example(program.placeholders()[0]).device
            with append.ctx.fake_mode:
                val = torch.zeros((), dtype=torch.int64, device=device)
            spec = Spec((), replicate=program.mesh.over(axis))
            found[axis] = append.placeholder(f"axis_index_{axis}", val, spec)
            added.append((found[axis], ir.Input(axis, "coordinate", spec)))
    return found, added
