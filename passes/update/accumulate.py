"""Split the step over microbatches: one graph that adds up gradients, one that applies their mean.

The accumulators keep the gradients' placement, partial sums included: nothing that the apply graph reduces
once is reduced a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from passes.program import ir
from passes.program.stages import Stage
from passes.update.optimize import Appender


@dataclass(frozen=True)
class Accumulate(ir.Pass):
    """Add each gradient to an accumulator in place; outputs keep the loss and metrics.

    With `skip_nonfinite` buffers stay as they were where the loss is infinite or not a number.
    """

    skip_nonfinite: bool = False
    name = "accumulate"
    takes = (Stage.JOINT,)
    gives = Stage.STEP

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        program = program.copy()
        append = Appender(program, ctx, "optimizer")
        buffers = {i.name: n for n, i in zip(program.placeholders(), program.inputs) if i.kind == "buffer"}
        if self.skip_nonfinite and buffers:
            loss = next(n for n, o in zip(program.results(), program.outputs) if o.kind == "loss")
            append.guard = append.call("finite", torch.isfinite, loss)
        added: list[ir.Input] = []
        kept = []
        for node, output in zip(program.results(), program.outputs, strict=True):
            append.parameter = output.name
            if output.kind == "gradient":
                total = append.placeholder(
                    f"total_{len(added)}", ir.example(node).new_empty(ir.example(node).shape), output.spec
                )
                added.append(ir.Input(output.name, "gradient", output.spec, layer=append.layers[output.name]))
                append.write(total, append.call("add", torch.add, total, node))
            elif output.kind == "buffer":
                append.keep(buffers[output.name], node)
            else:
                kept.append((node, output))
        program.graph.output_node().args = (tuple(n for n, _ in kept),)
        program.module.recompile()
        inputs = (*program.inputs, *added)
        program = replace(program, inputs=inputs, outputs=tuple(o for _, o in kept))
        return program, ir.Report({"accumulators": len(added)})


@dataclass(frozen=True)
class ApplyOnly(ir.Pass):
    """From a joint program, the one whose gradients are inputs: accumulated elsewhere, cleared once read."""

    name = "apply"
    takes = (Stage.JOINT,)

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        graph = fx.Graph()
        nodes, inputs, layers = [], [], {given.name: given.layer for given in program.inputs}
        for old, given in zip(program.placeholders(), program.inputs):
            if given.kind == "parameter":
                nodes.append(_input(graph, old.name, ir.example(old), given))
                inputs.append(given)
        results: list[fx.Node] = []
        outputs: list[ir.Output] = []
        for old, output in zip(program.results(), program.outputs):
            if output.kind == "gradient":
                given = ir.Input(output.name, "gradient", output.spec, layer=layers[output.name])
                val = ir.example(old).new_empty(ir.example(old).shape)
                results.append(_input(graph, f"total_{len(results)}", val, given))
                inputs.append(given)
                outputs.append(output)
        graph.output(tuple(results))
        program = program.with_graph(graph, inputs=tuple(inputs), outputs=tuple(outputs))
        return program, ir.Report({"gradients": len(outputs)})


def _input(graph: fx.Graph, name: str, val: torch.Tensor, given: ir.Input) -> fx.Node:
    node = graph.placeholder(name)
    ir.set_value(node, val)
    ir.set_spec(node, given.spec)
    return node
