"""Insert nodes into a graph: operators, the operators that a Python function calls, copies of a graph's nodes.

    edit = Editor.before(node, ctx)
    edit.call(aten.relu.default, (x,))                     %relu = relu(%x)
    edit.trace(lambda x, n: x.t() * n, x, 2.0)             %t = t(%x); %mul = mul(%t, 2.0)
    inline(node, lambda x: x / 3, ctx)                     the same in the node's place

Every node gets its value, computed on fake tensors, and the origin (code, phase, layer) of another node, by `mark`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.record import NodeRecord
from passes.ir.spec import Spec
from passes.trace.abstract_eval import Layout, map_values
from passes.trace.trace import trace


@dataclass(eq=False)
class Editor:
    """Inserts nodes into a graph.

    Attributes:
        ctx: the context of the pass.
        graph: the graph.
        place: the node before which it inserts; None: at the end.
        origin: the node whose code, phase and layer new nodes get.
        traced: the graphs of functions with a key, by key and layouts of operands.
    """

    ctx: ir.Context
    graph: fx.Graph
    place: fx.Node | None = None
    origin: fx.Node | None = None
    traced: dict[Any, fx.Graph] = field(default_factory=dict)

    @staticmethod
    def before(node: fx.Node, ctx: ir.Context) -> Editor:
        """Return an editor that inserts new nodes before `node`, with it as their origin; `ctx` is the pass's."""
        return Editor(ctx, node.graph, node, node)

    def moved_to(self, place: fx.Node, origin: fx.Node) -> Editor:
        """Return the editor for another place; it shares the traced graphs."""
        return replace(self, place=place, origin=origin)

    def inserting(self) -> AbstractContextManager:
        """Let the graph insert at the place."""
        return nullcontext() if self.place is None else self.graph.inserting_before(self.place)

    def mark(self, node: fx.Node) -> None:
        """Give a new node its origin."""
        if self.origin is not None:
            ir.copy_origin(node, self.origin)

    def placeholder(self, name: str, val: Tensor, spec: Spec) -> fx.Node:
        """Insert a graph input."""
        with self.inserting():
            node = self.graph.placeholder(name)
        ir.update(node, value=val, spec=spec)
        return node

    def call(self, target: Any, args: tuple, kwargs: Mapping[str, Any] | None = None) -> fx.Node:
        """Insert a call of the operator `target` with `args` and `kwargs`, nodes among them; return its node."""
        with self.inserting():
            node = self.graph.call_function(target, args, dict(kwargs or {}))
        return self.computed(node)

    def computed(self, node: fx.Node) -> fx.Node:
        """Compute the value of an inserted node, and give it its origin."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), ir.value)
        with self.ctx.fake_mode, torch.no_grad():
            ir.set_value(node, node.target(*args, **kwargs))  # type: ignore[operator]
        self.mark(node)
        return node

    def trace(self, fn: Callable[..., Any], *args: Any, key: Any = None) -> Any:
        """Insert the operators that `fn` calls on `args`, nodes among them as their values; return its result.

        A function with a `key` is traced once for operands of the same layouts; the key holds all that it closes over.
        """
        return self.graft(*self.body(fn, args, {}, key))[1]

    def body(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], key: Any = None
    ) -> tuple[fx.Graph, list[fx.Node]]:
        """Return the operators of `fn(*args, **kwargs)`, and the nodes that are its inputs, in order."""
        numbers: dict[fx.Node, int] = {}
        fx.map_arg((args, kwargs), lambda node: numbers.setdefault(node, len(numbers)))
        inputs = list(numbers)

        def over_tensors(*values: Any) -> Any:
            by_node = dict(zip(inputs, values, strict=True))
            positional, keyword = fx.map_arg((args, kwargs), by_node.__getitem__)
            return fn(*positional, **keyword)

        values = [ir.value(node) for node in inputs]
        if key is None:
            return trace(over_tensors, distinct(values), self.ctx), inputs
        place = getattr(fn, "__code__", None)  # two functions may have the same key
        signature = key, place, repr(fx.map_arg((args, kwargs), numbers.__getitem__)), *map(layout, values)
        if signature not in self.traced:
            with self.ctx.fake_mode, torch.no_grad():
                empties = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
            self.traced[signature] = trace(over_tensors, empties, self.ctx)
        return self.traced[signature], inputs

    def graft(self, body: fx.Graph, inputs: Sequence[fx.Node]) -> tuple[list[fx.Node], Any]:
        """Insert copies of a graph's operators, fed with `inputs`; return the new nodes and the graph's result."""
        copies: dict[fx.Node, Any] = dict(zip((n for n in body.nodes if n.op == "placeholder"), inputs, strict=True))
        new: list[fx.Node] = []
        with self.inserting():
            for inner in body.nodes:
                if inner.op == "output":
                    return new, fx.map_arg(inner.args[0], copies.__getitem__)
                if inner.op != "placeholder":
                    copies[inner] = ir.copy_node(self.graph, inner, copies)
                    ir.set_record(copies[inner], NodeRecord(ir.value(inner)))
                    self.mark(copies[inner])
                    new.append(copies[inner])
        raise AssertionError("a graph ends with its output")


def inline(node: fx.Node, fn: Callable[..., Any], ctx: ir.Context, alike: bool = False) -> list[fx.Node]:
    """Replace the node by the operators of `fn(*node.args, **node.kwargs)`; return the new nodes.

    Args:
        node: the node.
        fn: a function of its arguments.
        ctx: the context of the pass.
        alike: `fn` is the definition of the node's operator, and is traced once for calls on operands of equal
            layouts. Their nodes then record the same fake tensors: only for finished programs, whose memory is
            recomputed by a sweep.
    """
    edit = replace(Editor.before(node, ctx), traced=ctx.traced)
    return splice(node, *edit.body(fn, node.args, node.kwargs, node.target if alike else None), ctx)


def splice(node: fx.Node, body: fx.Graph, inputs: Sequence[fx.Node], ctx: ir.Context) -> list[fx.Node]:
    """Replace the node by a graph's operators, fed with `inputs`; return the new nodes."""
    new, result = Editor.before(node, ctx).graft(body, inputs)
    replace_by(node, result)
    return new


def replace_by(node: fx.Node, result: Any) -> None:
    """Replace a node by `result`, a node or a tuple whose elements replace its getitems, and erase it."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])
            user.graph.erase_node(user)
    node.graph.erase_node(node)


def distinct(values: Sequence[Any]) -> list[Any]:
    """Clone repeated tensors: a tensor passed twice would become one operand."""
    return [v.clone() if isinstance(v, Tensor) and any(v is w for w in values[:i]) else v for i, v in enumerate(values)]


def laid_out_as(like: Tensor, x: Tensor) -> Tensor:
    """Return a tensor with its dims in the memory order of another, as later views of it require."""
    order = sorted(range(x.dim()), key=like.stride().__getitem__, reverse=True)
    return x.permute(order).contiguous().permute(*(order.index(d) for d in range(x.dim())))


def layout(value: Tensor) -> tuple[Any, ...]:
    """The properties of a tensor that a trace may depend on."""
    return tuple(value.shape), value.stride(), value.dtype, value.device


def own_memory(nodes: list[fx.Node], ctx: ir.Context) -> None:
    """Give nodes copied from a graph new recorded tensors, with the layouts and shared storages of the originals."""
    storages: dict[torch.UntypedStorage, torch.UntypedStorage] = {}

    def renew(tensor: Tensor) -> Tensor:
        old = tensor.untyped_storage()
        if old not in storages:
            new = Layout.of(tensor).empty()
            storages[old] = new.untyped_storage()
            return new
        place = storages[old], tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)  # type: ignore[call-overload]

    with ctx.fake_mode, torch.no_grad():
        for node in nodes:
            ir.set_value(node, map_values(ir.value(node), renew, Tensor))


def move_before(node: fx.Node, target: fx.Node) -> None:
    """Move a node that comes after the target right before it, and with it the nodes that it reads."""
    waiting = [(node, target)]  # an explicit stack: chains are as long as programs
    while waiting:
        node, target = waiting.pop()
        if target < node:
            target.prepend(node)
            waiting += [(operand, node) for operand in reversed(node.all_input_nodes)]


def move_after(node: fx.Node, target: fx.Node) -> None:
    """Move a node that comes before the target right after it, and with it its users."""
    waiting = [(node, target)]
    while waiting:
        node, target = waiting.pop()
        if node < target:
            target.append(node)
            waiting += [(user, node) for user in reversed(node.users)]
