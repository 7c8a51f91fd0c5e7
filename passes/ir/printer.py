"""Stable text of a program: the same program gives the same text, on every rank and in every run.

    # mesh: dp_shard=2
    # stage: local
    # inputs: 2
    %w = parameter "wq.weight" : f32[4, 8] [8@dp_shard, 8]
    %x = batch "features" : f32[2, 8] [4@dp_shard, 8]
    # outputs: 1
    loss "loss" = %psum : f32[] []
    # nodes: 4
    %all_gather = all_gather(%w, 0, "dp_shard", 2, 8, f32, None) : f32[8, 8]   # model.py:31 wq forward
    %linear = linear(%x, %all_gather) : f32[2, 8] [4@dp_shard, 8]   # model.py:31 wq forward
    %sum_1 = sum(%linear) : f32[] [] sum(dp_shard)   # model.py:40 forward
    %psum = psum(%sum_1, "dp_shard", f32, None) : f32[] []   # model.py:40 forward

Shapes are those in the graph, of one rank once the program is local; the placement after them has the logical
sizes and the mesh axes. Names are the graph's own, which errors and reports use too.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.bodies import calls_of
from passes.ir.mesh import SEQUENCE_AXIS
from passes.ir.operators import namespace_of
from passes.torch_private import OpOverload

LONGEST = 8  # entries of a constant list that are printed; strings are printed up to 8 times as many characters
OMITTED_NAMESPACES = ("aten.", "ct.", "_c10d_functional.")
DTYPES = {"bfloat": "bf", "float": "f", "complex": "c", "uint": "u", "int": "i"}


class Line(NamedTuple):
    """A line of a program's text, its node, and the path of the graph that holds the node.

    The path is empty for the program's own graph.
    """

    text: str
    node: fx.Node | None = None
    graph: str = ""


@dataclass(frozen=True)
class Printed:
    """An operator or a constant of which only the printed text is known."""

    text: str

    @property
    def __name__(self) -> str:
        return self.text

    def __call__(self, *values: Any) -> Any:
        raise TypeError(f"{self.text} is known by its text and cannot be called")


def print_program(program: ir.Program) -> str:
    """Return the program as text, a line for each node; the graphs that its operators call follow by name."""
    return "\n".join(line.text for line in lines_of(program)) + "\n"


def lines_of(program: ir.Program) -> Iterator[Line]:
    """Yield the lines of a program's text."""
    sizes = [f"{axis}={size}{_order(program, axis)}" for axis, size in program.mesh.sizes]
    mesh = " ".join([*sizes, *(f"{name}={'*'.join(axes)}" for name, axes in program.mesh.flattened.items())])
    yield Line(f"# mesh: {mesh or 'one device'}")
    yield Line(f"# stage: {program.stage}")
    yield from (Line(f"# folded: {fold}") for fold in program.folds)
    yield Line(f"# inputs: {len(program.inputs)}")
    yield from _inputs(program)
    yield from _counts(program)
    yield Line(f"# outputs: {len(program.outputs)}")
    yield from _outputs(program)
    nodes = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    yield Line(f"# nodes: {len(nodes)}")
    yield from (Line(format_node(node), node) for node in nodes)
    yield from _called_graphs(program.module)
    yield from _bodies(program)


def _order(program: ir.Program, axis: str) -> str:
    """Return how the ranks of an axis hold a sharded dim, unless in its natural order."""
    return f" ({program.order})" if axis == SEQUENCE_AXIS and not program.order.is_plain else ""


def _inputs(program: ir.Program) -> Iterator[Line]:
    for node, input_ in zip(program.placeholders(), program.inputs, strict=True):
        text = f'%{node.name} = {input_.kind} "{input_.name}" : {format_value(ir.value(node))} {input_.spec}'
        yield Line(text, node)


def _counts(program: ir.Program) -> Iterator[Line]:
    """Yield the programs that compute the inputs counted over all microbatches."""
    for input_ in program.inputs:
        if input_.count is not None:
            yield Line(f"# {input_.name}: the sum, over all samples of {input_.count.microbatches} microbatches, of")
            yield from _graph(input_.count.program.graph, input_.name)


def _outputs(program: ir.Program) -> Iterator[Line]:
    for result, output in zip(program.results(), program.outputs, strict=True):
        value = format_value(ir.value(result)) if isinstance(result, fx.Node) else "constant"
        yield Line(f'{output.kind} "{output.name}" = {format_operand(result)} : {value} {output.spec}')


def _called_graphs(module: fx.GraphModule, path: str = "") -> Iterator[Line]:
    """Yield every graph in the module, such as the two bodies of a custom autograd function."""
    for name, child in sorted(module.named_children()):
        if isinstance(child, fx.GraphModule):
            yield Line(f"# graph: {path}{name}")
            yield from _graph(child.graph, f"{path}{name}")
            yield from _called_graphs(child, f"{path}{name}.")


def _bodies(program: ir.Program) -> Iterator[Line]:
    """Yield every body that the program calls, once; its nodes have the origins of the first call."""
    for body, calls in calls_of(program).items():
        yield Line(f"# body: {body.name}, called {len(calls)} times")
        yield from _graph(body.graph, body.name)


def _graph(graph: fx.Graph, path: str) -> Iterator[Line]:
    return (Line(format_node(node), node, path) for node in graph.nodes)


class Place(NamedTuple):
    """The origin of a node as printed: its line, its module, its phase, and if it is recomputed.

    A node of an update has the parameter's name instead of the module's path; a node without a module has its layer.
    """

    source: str
    module: str
    phase: str
    recomputed: bool


def place_of(node: fx.Node) -> Place:
    """Return the printed origin of a node."""
    layer = "" if ir.has_no_layer(node) else str(ir.layer(node) or "")
    phase = "no-phase" if ir.has_no_phase(node) else ir.phase(node)
    module = ir.module_path(node) or ir.parameter(node) or layer
    return Place(ir.source(node), module, phase, ir.is_recomputed(node))


def format_node(node: fx.Node) -> str:
    """Return `%name = op(operands) : dtype[shape] placement   # file.py:line module.path phase [recomputed]`."""
    if node.op == "output":
        return f"return {format_operand(node.args[0])}"
    spec = ir.spec(node)
    words = [f"%{node.name} =", _call(node), ":", format_value(ir.value(node))]
    words += [str(spec)] if spec is not None else []
    *origin, recomputed = place_of(node)
    return " ".join(words) + "   # " + " ".join(filter(None, (*origin, "recomputed" * recomputed)))


def _call(node: fx.Node) -> str:
    operands = [] if node.op == "call_function" else [str(node.target)]
    operands += [format_operand(a) for a in node.args]
    operands += [f"{key}={format_operand(node.kwargs[key])}" for key in sorted(node.kwargs)]
    return f"{name_of_call(node)}({', '.join(operands)})"


def name_of_call(node: fx.Node) -> str:
    """Return the name of a node's operator; for other nodes, their kind."""
    return op_name(node.target) if node.op == "call_function" else node.op


def op_name(target: Any) -> str:
    """Return `linear`, `add.Tensor`, `psum`, `prims.iota`: overload unless default, namespace unless well known."""
    return _op_name(target) if isinstance(target, OpOverload) else target.__name__


@functools.cache
def _op_name(target: OpOverload) -> str:
    return short_name(f"{namespace_of(target)}.{str(target).partition('.')[2]}")


@functools.cache
def short_name(name: str) -> str:
    """Return `aten.linear.default` as printed: `linear`."""
    name = name.removesuffix(".default")
    return next((name.removeprefix(space) for space in OMITTED_NAMESPACES if name.startswith(space)), name)


def format_value(val: Any) -> str:
    """Return `f32[4, 8]` for a tensor, `(f32[4], i64[4])` for several, otherwise the value."""
    if isinstance(val, Tensor):
        return f"{format_dtype(val.dtype)}[{', '.join(map(str, val.shape))}]"
    if isinstance(val, (tuple, list)):
        return f"({', '.join(map(format_value, val))})"
    return format_constant(val)


@functools.cache
def format_dtype(dtype: torch.dtype) -> str:
    """Return a dtype as `f32`, `bf16`, `i64`, `f8_e4m3fn` or `bool`."""
    name = str(dtype).removeprefix("torch.")
    return next((name.replace(long, short, 1) for long, short in DTYPES.items() if name.startswith(long)), name)


def format_operand(arg: Any) -> str:
    """Return an operand as text: `%name`, or a constant; a long one is cut and ends in a hash of all of it."""
    if isinstance(arg, fx.Node):
        return f"%{arg.name}"
    if isinstance(arg, (tuple, list)):
        return _format_list([format_operand(a) for a in arg])
    if isinstance(arg, dict):
        return "{" + ", ".join(f"{key}: {format_operand(arg[key])}" for key in sorted(arg)) + "}"
    if isinstance(arg, slice):
        return f"slice({format_operand([arg.start, arg.stop, arg.step])[1:-1]})"
    return format_constant(arg)


def _format_list(entries: list[str]) -> str:
    is_constant = not any(entry.startswith("%") for entry in entries)
    if is_constant and len(entries) > LONGEST:
        full = ", ".join(entries)
        entries = [*entries[:LONGEST], f"... {len(entries)} in all #{_digest(full)}"]
    return f"[{', '.join(entries)}]"


def format_constant(arg: Any) -> str:
    """Return a constant without its address: numbers and names in full, other objects by their type."""
    if isinstance(arg, torch.dtype):
        return format_dtype(arg)
    if isinstance(arg, str):
        return json.dumps(arg if len(arg) <= 8 * LONGEST else f"{arg[: 8 * LONGEST]}... #{_digest(arg)}")
    if isinstance(arg, Printed):
        return arg.text
    if arg is None or isinstance(arg, (bool, int, float, complex)):
        return repr(arg)
    if isinstance(arg, torch.device):
        return arg.type  # without its number, which differs between ranks
    if isinstance(arg, (torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(arg).removeprefix("torch.")
    return f"<{type(arg).__name__}>"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
