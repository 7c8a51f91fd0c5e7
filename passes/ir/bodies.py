"""A program as calls of bodies: pieces of its graph; equal pieces are written and compiled once.

    %block_1 = block(%x, %layers.0.w)          the program: a short list of calls
    %x1 = getitem(%block_1, 0)
    %block_2 = block(%x1, %layers.1.w)
    # body: block, called 2 times
    p0, p1 -> mm -> silu -> return (silu)      the body that they call

A body is identified by its text: operators, constants and the layouts of its inputs, in order of use, without names of
layers or values. A call keeps the names and origins of the nodes that it replaces, so `flatten` restores the exact
program that was cut.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.layer import Layer
from passes.ir.operators import is_view
from passes.ir.record import BodyNode
from passes.ir.stages import Stage
from passes.torch_private import OpOverload


@dataclass(frozen=True, eq=False)
class Body:
    """A graph of placeholders, operators and a returned tuple; `key` is a digest of its text.

    `results` are the positions of the returned operators; a call may use only some of them. A `flat` body is
    elementwise, at most with full sums, on numbers and on contiguous tensors of one size, whatever the size: its calls
    may differ in that size, and it may be compiled for 1-D tensors of any length.
    """

    name: str
    graph: fx.Graph
    key: str
    results: tuple[int, ...]
    flat: bool = False

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *values: Any) -> Any:
        raise TypeError(f"body {self.name} cannot be called; compile it, or inline it by `flatten`")


def body_of_call(node: fx.Node) -> Body | None:
    """Return the body that a node calls, or None."""
    return node.target if isinstance(node.target, Body) else None


def calls_of(program: ir.Program) -> dict[Body, list[fx.Node]]:
    """Return the bodies of a program in the order of their first calls, with all their calls."""
    calls: dict[Body, list[fx.Node]] = {}
    for node in program.calls():
        if body := body_of_call(node):
            calls.setdefault(body, []).append(node)
    return calls


# ---- cutting and flattening -------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A run of nodes, the values that it reads, in order of use, and those of its nodes that others read.

    Its nodes may include views from before the run, which are computed where they are read. `views` are computed
    outside, before the call. `layer` is the layer whose work it is.
    """

    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...] = ()
    layer: Layer | None = None

    def positions(self) -> tuple[int, ...]:
        """Return the positions of the nodes that are results."""
        return tuple(i for i, node in enumerate(self.nodes) if node in self.results)

    def graph(self, results: Sequence[int]) -> fx.Graph:
        """Return the piece as a graph, which returns the nodes at these positions."""
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for i, operand in enumerate(self.reads):
            env[operand] = graph.placeholder(f"p{i}")
            ir.set_record(env[operand], ir.record(operand))
        for node in self.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[self.nodes[i]] for i in results))
        return graph


def cut_out(
    nodes: Sequence[fx.Node],
    results: Sequence[fx.Node],
    extra_reads: Sequence[fx.Node] = (),
    views: Sequence[fx.Node] = (),
) -> Piece:
    """Return the piece of these nodes. It also reads `extra_reads`, which must not be freed before it is done."""
    inside = set(nodes)
    # Sorted, so that equal pieces read their values in the same order.
    extra_reads = sorted(extra_reads, key=lambda node: describe_layout(ir.value(node)))
    operands = (operand for node in nodes for operand in node.all_input_nodes if operand not in inside)
    reads = tuple(dict.fromkeys((*operands, *(node for node in extra_reads if node not in inside))))
    return Piece(tuple(nodes), reads, tuple(results), tuple(views))


def insert_call(graph: fx.Graph, body: Body, piece: Piece, env: dict[fx.Node, Any]) -> fx.Node:
    """Insert a call of the body in place of a piece; `env` maps nodes of the old graph to those of the new."""
    for node in piece.views:
        if node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    call = graph.call_function(body, tuple(env[operand] for operand in piece.reads))
    body_nodes = tuple(BodyNode(node.name, ir.record(node)) for node in piece.nodes)
    ir.copy_origin(call, piece.nodes[-1])
    results = tuple(ir.value(piece.nodes[i]) for i in body.results)
    ir.update(call, value=results, layer=piece.layer, body_nodes=body_nodes)
    for node in piece.results:
        index = body.results.index(piece.nodes.index(node))
        env[node] = graph.create_node("call_function", operator.getitem, (call, index), name=node.name)
        ir.set_record(env[node], ir.record(node))
    return call


def flatten(program: ir.Program) -> ir.Program:
    """Replace every call by the nodes that it stands for, under their own names."""
    if not any(map(body_of_call, program.calls())):
        return program
    if program.module not in _flattened:
        inline = _Inline()
        for node in program.graph.nodes:
            inline.put(node)
        _flattened[program.module] = inline.graph
    return program.with_graph(_flattened[program.module], stage=min(program.stage, Stage.ORDERED))


_flattened: WeakKeyDictionary[fx.GraphModule, fx.Graph] = WeakKeyDictionary()  # callers share these


class _Inline:
    """A graph in which calls are inlined; a view that several pieces compute is computed once."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}  # old node -> new node; for a call, all its results
        self.copies: dict[str, list[fx.Node]] = {}  # by the original name, which equal layers share

    def put(self, node: fx.Node) -> None:
        """Append the nodes that a node stands for."""
        if body := body_of_call(node):
            self.env[node] = self.expand(body, node)
        elif node.target is operator.getitem and isinstance(self.env[node.args[0]], tuple):  # type: ignore[index]
            self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
        else:
            self.env[node] = self.make(node, self.env, BodyNode(node.name, ir.record(node)))

    def expand(self, body: Body, call: fx.Node) -> tuple[fx.Node, ...]:
        """Append the nodes that a call stands for; return the body's results."""
        arguments, body_nodes = iter(call.args), iter(ir.record(call).body_nodes)
        values: dict[fx.Node, Any] = {}
        for node in body.graph.nodes:
            if node.op == "placeholder":
                values[node] = self.env[next(arguments)]  # type: ignore[index]
            elif node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            else:
                values[node] = self.make(node, values, next(body_nodes))
        raise AssertionError("a graph ends with its output")

    def make(self, node: fx.Node, env: dict[fx.Node, Any], body_node: BodyNode) -> fx.Node:
        """Return the node under its name in the flat graph, appended unless it is already there."""
        args, kwargs = fx.map_arg(node.args, env.__getitem__), node.kwargs
        if kwargs:
            kwargs = fx.map_arg(kwargs, env.__getitem__)
        copies = self.copies.setdefault(body_node.name, [])
        for copy in copies:
            if (copy.target, copy.args, copy.kwargs) == (node.target, args, kwargs):
                return copy
        new = self.graph.create_node(node.op, node.target, name=body_node.name)
        new.args = args  # operands afterwards: see `ir.copy_node`
        if kwargs:
            new.kwargs = kwargs
        ir.set_record(new, body_node.record)
        copies.append(new)
        return new


def is_site(node: fx.Node) -> bool:
    """Return True if a node is the number of a random operator's site, which keys dropout's random numbers.

    It is computed before all calls and passed to bodies: layers with dropout are equal except for it.
    """
    if node.target is not torch.ops.aten.full_like.default or node.args[0].op != "placeholder":  # type: ignore[union-attr]
        return False
    value = ir.example(node)
    return value.dtype == torch.int64 and not value.dim()


def base_of(node: fx.Node) -> fx.Node:
    """Return the tensor that a view is of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


# ---- the text that identifies a body ----------------------------------------------------------------


def text_of(graph: fx.Graph, flat: bool = False) -> str:
    """Return operators, constants and input layouts as text, values numbered in order; without shapes if `flat`."""
    numbers = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(f"{numbers[node]} {describe_layout(ir.value(node), flat)}")
        else:
            operands = describe_operand((node.args, node.kwargs), numbers)
            lines.append(f"{numbers[node]} {'return' if node.op == 'output' else _target(node.target)} {operands}")
    return "\n".join(lines)


def key_of(text: str) -> str:
    """Return the digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _target(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else f"{target.__module__}.{target.__qualname__}"


def describe_layout(value: Any, flat: bool = False) -> str:
    """Return dtype, kind of device, shape and strides as text; if `flat`, only whether there are dims."""
    if isinstance(value, Tensor):
        shape = "line" if flat and value.dim() else f"{tuple(value.shape)} {value.stride()} {value.storage_offset()}"
        return f"{value.dtype} {value.device.type} {shape}"  # ranks of a machine share bodies
    if isinstance(value, (tuple, list)):
        return f"({', '.join(describe_layout(part, flat) for part in value)})"
    return repr(value)


def same_layout(a: Any, b: Any) -> bool:
    """Return True for two values of the same dtypes, kinds of device, shapes and strides."""
    return a is b or describe_layout(a) == describe_layout(b)


def describe_operand(arg: Any, names: Mapping[fx.Node, str]) -> str:
    """Return an operand as text; raise CompileError if the text would not distinguish it from others."""
    if isinstance(arg, fx.Node):
        return names[arg]
    if isinstance(arg, (tuple, list)):
        return f"[{', '.join([describe_operand(part, names) for part in arg])}]"
    if isinstance(arg, dict):
        return f"{{{', '.join([f'{key}={describe_operand(part, names)}' for key, part in arg.items()])}}}"
    if isinstance(arg, slice):
        return f"slice{describe_operand((arg.start, arg.stop, arg.step), names)}"
    if isinstance(arg, torch.device):
        return arg.type
    if arg is None or isinstance(arg, _CONSTANTS):
        return repr(arg)
    kind = type(arg).__name__
    raise ir.CompileError("segment", None, f"an operator has a constant of type {kind}; two may have the same text")


_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)
