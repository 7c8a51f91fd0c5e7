"""Cut a program to the smallest piece on which a pass still fails.

A piece is some nodes of the program before the pass; values read from outside become inputs with their recorded values
and placements. If a gradient is wrong, the piece ends in a loss: its result times the gradient of the full program
there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from compiler_trainer.bisect.piece import Kind, Piece, Sketch, check, gist
from passes.ir import ir
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.ops.reshard import psum

aten = torch.ops.aten


@dataclass(frozen=True)
class Source:
    """The source of pieces: a program, full values by input and node name, placements and gradients by node."""

    program: ir.Program
    wholes: Mapping[str, Tensor]
    specs: Mapping[str, Spec]
    gradients: Mapping[str, Tensor]


def smallest(source: Source, step: ir.Pass, kind: Kind, message: str, node: fx.Node, is_gradient: bool) -> Piece | None:
    """Return the smallest piece, of growing size, on which the pass fails in the given way; None if there is none."""
    leaves = {node} if is_gradient else set()
    for nodes in growing(source.program, node, is_gradient):
        piece = cut_piece(source, step, nodes, leaves)
        if piece is not None and is_alike(piece, kind, message):
            return pruned(source, piece, nodes, leaves)
    piece = everything(source, step)
    return piece if is_alike(piece, kind, message) else None


def is_alike(piece: Piece, kind: Kind, message: str) -> bool:
    """Return True if a piece fails in this way; for a crash, with the same message up to names and numbers."""
    return piece.kind == kind and (kind != "crash" or gist(piece.message) == gist(message))


def pruned(source: Source, piece: Piece, nodes: Sequence[fx.Node], leaves: set[fx.Node]) -> Piece:
    """Return the piece without nodes that the failure does not need; the earliest are removed first."""
    for node in list(nodes):
        remaining = [n for n in nodes if n is not node]
        smaller = cut_piece(source, piece.step, remaining, leaves) if remaining else None
        if smaller is not None and is_alike(smaller, piece.kind, piece.message):
            piece, nodes = smaller, remaining
    return piece


def growing(program: ir.Program, node: fx.Node, is_gradient: bool) -> Iterator[list[fx.Node]]:
    """Yield growing sets of nodes around `node`: its ancestors or, for a gradient, its users."""
    reached = {n for n in (node.users if is_gradient else (node,)) if n.op == "call_function"}
    for distance in range(9):
        chosen = reached | {n.all_input_nodes[0] for n in reached if n.target is operator.getitem}
        if distance in (0, 1, 2, 4, 8):
            yield [n for n in program.calls() if n in chosen]
        neighbors = [m for n in chosen for m in (n.users if is_gradient else n.all_input_nodes)]
        reached = chosen | {m for m in neighbors if m.op == "call_function"}


def cut_piece(source: Source, step: ir.Pass, nodes: Sequence[fx.Node], leaves: set[fx.Node]) -> Piece | None:
    """Return the piece of some nodes; with `leaves`, the piece of their gradients. None if it cannot be cut there."""
    ends = [n for n in nodes if ir.is_tensor(n) and not any(user in nodes for user in n.users)]
    if not ends or not all(n.name in source.specs for n in ends):
        return None
    if any(not ir.is_tensor(operand) for n in nodes for operand in n.all_input_nodes if operand not in nodes):
        return None
    if leaves and not all(n.name in source.gradients for n in ends):
        return None
    sketch = Sketch(source.program.mesh, source.program.stage)
    copies = copy_nodes(source, sketch, nodes, leaves)
    values = {i.name: source.wholes[i.name] for i in sketch.inputs if i.name in source.wholes}
    if leaves:
        values |= close(source, sketch, ends, copies)
    else:
        for end in ends:
            is_local = source.program.stage >= Stage.LOCAL
            spec = source.specs[end.name] if is_local else Spec.whole(tuple(ir.example(end).shape))
            sketch.output(end.name, "metric", spec, copies[end])
    return Piece(sketch, step, values, *check(sketch, step, values))


def everything(source: Source, step: ir.Pass) -> Piece:
    """Return the full program as a piece."""
    sketch = Sketch(source.program.mesh, source.program.stage)
    copies = copy_nodes(source, sketch, list(source.program.calls()), set())
    for node, output in zip(source.program.results(), source.program.outputs, strict=True):
        sketch.output(output.name, output.kind, output.spec, copies[node])
    values = {i.name: source.wholes[i.name] for i in sketch.inputs if i.name in source.wholes}
    return Piece(sketch, step, values, *check(sketch, step, values))


def copy_nodes(
    source: Source, sketch: Sketch, nodes: Sequence[fx.Node], leaves: set[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Copy the nodes into a sketch; values read from outside become inputs."""
    ends = dict(zip(source.program.placeholders(), source.program.inputs, strict=True))
    node_set, copies = set(nodes), dict[fx.Node, fx.Node]()
    outside = {operand for node in nodes for operand in node.all_input_nodes if operand not in node_set}
    for node in source.program.graph.nodes:
        if node in outside:
            program_input = ends.get(node) or ir.Input(node.name, "batch", placed(source, node))
            kind = "parameter" if node in leaves else program_input.kind
            copies[node] = sketch.input(node.name, program_input.name, kind, program_input.spec, ir.example(node).dtype)
        elif node in node_set:
            args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
            attributes: dict[str, Any] = {
                "source": ir.source(node),
                "module": ir.module_path(node),
                "phase": ir.phase(node),
            }
            attributes |= {"spec": ir.spec(node), "layer": ir.layer(node), "role": ir.record(node).role}
            copies[node] = sketch.call(node.name, node.target, args, kwargs, **attributes)
    return copies


def placed(source: Source, node: fx.Node) -> Spec:
    """Return the placement of an outside value; undefined padding is filled with ones, which a mask has to hide."""
    spec = source.specs.get(node.name) or Spec.whole(tuple(ir.example(node).shape))
    return replace(spec, fill=1.0 if spec.fill is None else spec.fill)


def close(
    source: Source, sketch: Sketch, ends: Sequence[fx.Node], copies: Mapping[fx.Node, fx.Node]
) -> dict[str, Tensor]:
    """End the sketch in a loss, the sum of each end times its gradient; return the gradients as values of inputs."""
    is_local = source.program.stage >= Stage.LOCAL
    losses, values = [], {}
    for end in ends:
        spec, x, name = source.specs[end.name], copies[end], f"gradient_of_{end.name}"
        for axis in spec.partial_axes if is_local else ():
            x = sketch.call(f"whole_{axis}_{end.name}", psum, (x, axis, ir.example(x).dtype, None))
        # replicated copies: only the first rank's term counts, as the full sum
        weights = replace(spec, partial=tuple((axis, "sum") for axis in spec.replicate), replicate=())
        weight = sketch.input(name, name, "batch", weights, source.gradients[end.name].dtype)
        values[name] = source.gradients[end.name]
        product = sketch.call(f"times_{end.name}", aten.mul.Tensor, (x, weight))
        x = sketch.call(f"sum_{end.name}", aten.sum.default, (product,))
        for axis in (*weights.sharded, *weights.partial_axes) if is_local else ():
            x = sketch.call(f"sum_{axis}_{end.name}", psum, (x, axis, ir.example(x).dtype, None))
        losses.append(x)
    loss = losses[0]
    for i, x in enumerate(losses[1:]):
        loss = sketch.call(f"loss_{i}", aten.add.Tensor, (loss, x))
    sketch.output("loss", "loss", Spec.whole(()), loss)
    return values
