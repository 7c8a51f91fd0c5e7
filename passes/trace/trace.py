"""Record the operators that a Python function calls on fake tensors, as a graph.

    trace(lambda x: x.t().contiguous(), [x], ctx)  ->  %t = t(%x0); %contiguous = contiguous(%t)

`make_fx` does the same for many more kinds of functions, at three times the cost per operator and five times the cost
per trace: half of the time of a compilation, which traces thousands of small functions.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.operators import is_mutable
from passes.torch_private import FakeTensor, TorchDispatchMode, composite_operators, number_in, snapshot

aten = torch.ops.aten


class UnknownTensor(ValueError):
    """A function reads a tensor that is not among its arguments."""


class Tape:
    """A graph that grows by every operator called on its tensors.

    `written` is called with each new node.
    """

    def __init__(self, written: Callable[[fx.Node], None] = lambda node: None):
        self.graph = fx.Graph()
        self.written = written
        # by the tensor's id, weakly: PyTorch would copy a new tensor that had another reference here
        self.nodes: dict[int, tuple[weakref.ref[Tensor], fx.Node]] = {}

    def input(self, value: Tensor) -> None:
        """Add a placeholder for a tensor."""
        self._register(value, self.graph.placeholder(f"x{len(self.nodes)}"))

    def output(self, results: Any) -> fx.Graph:
        """End the graph with its results (tensors, and tuples and lists of them), and return it."""
        self.graph.output(self._read(results))
        return self.graph

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator, and record it if its results are tensors; return them."""
        result = target(*args, **kwargs)
        if target is aten.lift_fresh.default:  # PyTorch's wrapper of a constant
            self._register(result, self._node(args[0]))
            return result
        parts = [result] if isinstance(result, Tensor) else result if isinstance(result, (tuple, list)) else []
        if not any(isinstance(part, Tensor) for part in parts):
            return result
        name = target.overloadpacket.__name__.lower()
        node = self.graph.create_node("call_function", target, self._read(args), self._read(kwargs), name)
        if isinstance(result, Tensor):
            self._register(result, node)
        else:
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._register(part, self.graph.create_node("call_function", operator.getitem, (node, i)))
            ir.set_value(node, type(result)(map(snapshot, result)))
            self.written(node)
        return result

    def _register(self, value: Tensor, node: fx.Node) -> None:
        self.nodes[id(value)] = weakref.ref(value), node
        ir.set_value(node, snapshot(value))
        self.written(node)

    def _read(self, tree: Any) -> Any:
        return fx.node.map_aggregate(tree, lambda x: self._node(x) if isinstance(x, Tensor) else x)

    def _node(self, value: Tensor) -> fx.Node:
        reference, node = self.nodes.get(id(value), (lambda: None, None))
        return node if reference() is value else self._alias(value) or self._constant(value)

    def _alias(self, value: Tensor) -> fx.Node | None:
        """Return a node with the same memory and layout: autograd returns a saved result as another tensor."""
        for reference, node in reversed(self.nodes.values()):
            other = reference()
            if (
                other is not None
                and other.untyped_storage() is value.untyped_storage()
                and layout_of(other) == layout_of(value)
            ):
                return node
        return None

    def _constant(self, value: Tensor) -> fx.Node:
        """Record a number that a function holds as a tensor."""
        if isinstance(value, FakeTensor) or value.numel() != 1:
            raise UnknownTensor(f"a tensor ({value.dtype} {list(value.shape)}) that is not an argument")
        args, kwargs = (list(value.shape), number_in(value)), {"dtype": value.dtype, "device": value.device}
        node = self.graph.create_node("call_function", aten.full.default, args, kwargs, "full")
        ir.set_value(node, aten.full.default(*args, **kwargs))
        self.written(node)
        return node


class Recorder(TorchDispatchMode):
    """While active, records operators on a tape, after autograd and PyTorch's composite definitions."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.tape.call(func, args, kwargs or {})


def layout_of(value: Tensor) -> tuple[Any, ...]:
    """Return the layout of a tensor in its memory, and whether it is a conjugate or negative view of it."""
    return value.dtype, value.shape, value.stride(), value.storage_offset(), value.is_conj(), value.is_neg()


def trace(fn: Callable[..., Any], args: Sequence[Tensor], ctx: ir.Context) -> fx.Graph:
    """Return the operators that `fn` calls on fake tensors `args`, composite ones undecomposed.

    The graph has a placeholder for each argument. In-place writes become new values, except that writes into an
    argument come last. Raises UnknownTensor if `fn` reads a tensor that is not an argument, unless that is a single
    number.
    """
    tape = Tape()
    for value in args:
        tape.input(value)
    with torch.no_grad(), ctx.fake_mode, composite_operators(tape.call):
        graph = tape.output(fn(*args))
    return functional(graph, args, ctx) if any(map(is_mutable, graph.nodes)) else graph


def functional(graph: fx.Graph, args: Sequence[Tensor], ctx: ir.Context) -> fx.Graph:
    """Return the graph without in-place writes, with composite operators decomposed."""
    tape = Tape()
    for value in args:
        tape.input(value)
    run = fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run
    with torch.no_grad(), ctx.fake_mode, Recorder(tape):
        result = tape.output(torch.func.functionalize(run, remove="mutations")(*args))
    result.eliminate_dead_code()
    return result
