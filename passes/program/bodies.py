"""A program as calls of bodies: pieces of its graph, those that are alike written and compiled once.

    %block_1 = block(%x, %layers.0.w)          the program: a short list of calls
    %x1 = getitem(%block_1, 0)
    %block_2 = block(%x1, %layers.1.w)
    # body: block, called 2 times
    p0, p1 -> mm -> silu -> return (silu)      what they call

A body is known by its text: operators, constants and the layouts of what it is given, in order of use, and no name of
a layer or a value. The nodes that a call stands for keep their names and origins in the call, so that `flatten` gives
back the very program that was cut.
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

from passes.program import ir
from passes.program.layer import Layer
from passes.program.operators import is_view
from passes.program.record import BodyNode
from passes.program.stages import Stage
from passes.program.torch_private import OpOverload


@dataclass(frozen=True, eq=False)
class Body:
    """A graph of placeholders, operators and a returned tuple; `key` is a digest of its text.

    `results` says which of its operators it returns, counted in order; a call may use some of them only. A `flat` body
    is elementwise, at most with whole sums, on contiguous tensors of one size, whichever it is, and on numbers: calls
    of it differ in that size, and it may be compiled for tensors laid out as a line of any length.
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
        raise TypeError(f"body {self.name} is compiled, or put in line by `flatten`; it is not called by itself")


def body_of_call(node: fx.Node) -> Body | None:
    """The body that a node calls, if it does."""
    return node.target if isinstance(node.target, Body) else None


def calls_of(program: ir.Program) -> dict[Body, list[fx.Node]]:
    """The bodies of a program in the order of their first calls, with all their calls."""
    found: dict[Body, list[fx.Node]] = {}
    for node in program.calls():
        if body := body_of_call(node):
            found.setdefault(body, []).append(node)
    return found


# ---- there and back ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A run of nodes: the values that it reads, in order of use, and those of its own that others read.

    Views may be among its nodes though they stand before the run: they are made where they are read. `views` are made
    outside, before the call. `layer` is the one whose work it is.
    """

    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...] = ()
    layer: Layer | None = None

    def positions(self) -> tuple[int, ...]:
        """Which of its nodes are results."""
        return tuple(i for i, node in enumerate(self.nodes) if node in self.results)

    def graph(self, results: Sequence[int]) -> fx.Graph:
        """A graph of its own, which returns the nodes at these positions."""
        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for i, operand in enumerate(self.reads):
            env[operand] = graph.placeholder(f"p{i}")
            ir.set_record(env[operand], ir.record(operand))
        for node in self.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[self.nodes[i]] for i in results))
        return graph


def cut_out(
    nodes: Sequence[fx.Node], results: Sequence[fx.Node], held: Sequence[fx.Node] = (), views: Sequence[fx.Node] = ()
) -> Piece:
    """The piece of these nodes; it is given the values `held` as well, for they must not be freed before it is done."""
    inside = set(nodes)
    held = sorted(held, key=lambda node: describe_layout(ir.value(node)))  # pieces alike hold them in one order
    used = (operand for node in nodes for operand in node.all_input_nodes if operand not in inside)
    reads = tuple(dict.fromkeys((*used, *(node for node in held if node not in inside))))
    return Piece(tuple(nodes), reads, tuple(results), tuple(views))


def insert_call(graph: fx.Graph, body: Body, piece: Piece, env: dict[fx.Node, Any]) -> fx.Node:
    """A call of the body in the place of a piece; `env` maps the nodes of the old graph to those of the new."""
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
    """The program with every call replaced by the nodes that it stands for, under their own names."""
    if not any(map(body_of_call, program.calls())):
        return program
    if program.module not in _flattened:
        inline = _Inline()
        for node in program.graph.nodes:
            inline.put(node)
        _flattened[program.module] = inline.graph
    return program.with_graph(_flattened[program.module], stage=min(program.stage, Stage.ORDERED))


_flattened: WeakKeyDictionary[fx.GraphModule, fx.Graph] = WeakKeyDictionary()  # several ask for the same one


class _Inline:
    """A graph in which calls are put in line; a view that several pieces make is made once."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.env: dict[fx.Node, Any] = {}  # what stands for a node; for a call, all that it returns
        self.made: dict[str, list[fx.Node]] = {}  # by the name asked for: layers written alike ask for the same

    def put(self, node: fx.Node) -> None:
        """Append what a node stands for."""
        if body := body_of_call(node):
            self.env[node] = self.expand(body, node)
        elif node.target is operator.getitem and isinstance(self.env[node.args[0]], tuple):  # type: ignore[index]
            self.env[node] = self.env[node.args[0]][node.args[1]]  # type: ignore[index]
        else:
            self.env[node] = self.make(node, self.env, BodyNode(node.name, ir.record(node)))

    def expand(self, body: Body, call: fx.Node) -> tuple[fx.Node, ...]:
        """Append the nodes that a call stands for; returns what the body returns."""
        given, body_nodes = iter(call.args), iter(ir.record(call).body_nodes)
        own: dict[fx.Node, Any] = {}
        for node in body.graph.nodes:
            if node.op == "placeholder":
                own[node] = self.env[next(given)]  # type: ignore[index]
            elif node.op == "output":
                return fx.map_arg(node.args[0], own.__getitem__)
            else:
                own[node] = self.make(node, own, next(body_nodes))
        raise AssertionError("a graph ends with its output")

    def make(self, node: fx.Node, env: dict[fx.Node, Any], to: BodyNode) -> fx.Node:
        """The node under its name in the flat graph, appended unless it is there already."""
        args, kwargs = fx.map_arg(node.args, env.__getitem__), node.kwargs
        if kwargs:
            kwargs = fx.map_arg(kwargs, env.__getitem__)
        made = self.made.setdefault(to.name, [])
        for found in made:
            if (found.target, found.args, found.kwargs) == (node.target, args, kwargs):
                return found
        new = self.graph.create_node(node.op, node.target, name=to.name)
        new.args = args  # operands afterwards: see `ir.copy_node`
        if kwargs:
            new.kwargs = kwargs
        ir.set_record(new, to.record)
        made.append(new)
        return new


def is_site(node: fx.Node) -> bool:
    """Whether an operator yields the number of a place in the model, which dropout keys its random numbers with.

    It is made before all calls and given to bodies: layers that drop out are alike but for it.
    """
    if node.target is not torch.ops.aten.full_like.default or node.args[0].op != "placeholder":  # type: ignore[union-attr]
        return False
    made = ir.example(node)
    return made.dtype == torch.int64 and not made.dim()


def base_of(node: fx.Node) -> fx.Node:
    """What a view is of."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


# ---- the text that a body is known by ---------------------------------------------------------------


def text_of(graph: fx.Graph, flat: bool = False) -> str:
    """Operators, constants and layouts of what is given, values numbered in order; a `flat` one knows no shape."""
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
    """The digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _target(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else f"{target.__module__}.{target.__qualname__}"


def describe_layout(value: Any, flat: bool = False) -> str:
    """Dtype, kind of device, shape and strides of a tensor or several; of a `flat` one whether it has dims."""
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
    """An operand in full; raises CompileError for one whose text would not tell it from others."""
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
    raise ir.CompileError("segment", None, f"an operator has a constant of type {kind}: two of them may read alike")


_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)
