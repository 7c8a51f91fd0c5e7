"""Replace a node by the operators that a Python function of its arguments calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from passes.program import ir
from passes.program.abstract_eval import Layout, map_values
from passes.program.record import NodeRecord
from passes.program.trace import trace


def inline(node: fx.Node, fn: Callable[..., Any], ctx: ir.Context) -> list[fx.Node]:
    """Put the operators of `fn(*node.args, **node.kwargs)` in the node's place; returns the new nodes."""
    return splice(node, body_of_call(node, fn, ctx), list(node.all_input_nodes))


def inline_alike(node: fx.Node, fn: Callable[..., Any], ctx: ir.Context) -> list[fx.Node]:
    """As `inline`, traced once for calls of an operator on operands that lie alike, `fn` being what it stands for.

    Their nodes then record the same fake tensors: for finished programs, where memory is read from a sweep.
    """
    inputs = list(node.all_input_nodes)
    layouts = fx.map_arg((node.args, node.kwargs), lambda n: (inputs.index(n), *map(layout, _tensors(n))))
    key = node.target, repr(layouts)
    if key not in ctx.traced:
        ctx.traced[key] = body_of_call(node, fn, ctx)
    return splice(node, ctx.traced[key], inputs)


class Editor:
    """Puts the operators of Python functions into graphs; those of one key are traced once a layout of their operands.

    What is traced lies in memory of its own: one value given twice would become one operand.
    """

    def __init__(self, ctx: ir.Context):
        self.ctx, self.traced = ctx, dict[Any, fx.Graph]()

    def put(
        self,
        before: fx.Node,
        key: Any,
        fn: Callable[..., Any],
        inputs: Sequence[fx.Node],
        mark: Callable[[fx.Node], None],
    ) -> Any:
        """Put the operators of `fn` on the nodes' values before a node, each marked; returns what `fn` returns."""
        values = [ir.example(n) for n in inputs]
        signature = key, *map(layout, values)
        if signature not in self.traced:
            with self.ctx.fake_mode, torch.no_grad():
                fresh = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]
            self.traced[signature] = trace(fn, fresh, self.ctx)
        with before.graph.inserting_before(before):
            new, result = graft(before.graph, self.traced[signature], list(inputs))
        for node in new:
            mark(node)
        return result


def before(node: fx.Node, body: Callable[..., Any], args: Sequence[Any], ctx: ir.Context) -> Any:
    """Put the operators of `body(*args)` before a node, as if they came from it; returns what it returns."""
    inputs = list(dict.fromkeys(a for a in args if isinstance(a, fx.Node)))

    def on(*values: torch.Tensor) -> Any:
        given = dict(zip(inputs, values))
        return body(*(given[a] if isinstance(a, fx.Node) else a for a in args))

    return Editor(ctx).put(node, body, on, inputs, lambda new: ir.copy_origin(new, node))


def laid_out_as(like: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A tensor with its dims in memory as those of another one, which views of it count on."""
    order = sorted(range(x.dim()), key=like.stride().__getitem__, reverse=True)
    return x.permute(order).contiguous().permute(*(order.index(d) for d in range(x.dim())))


def layout(value: torch.Tensor) -> tuple[Any, ...]:
    """What a trace may depend on of a tensor."""
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    found = ir.value(node)
    return list(found) if isinstance(found, (tuple, list)) else [found]


def body_of_call(node: fx.Node, fn: Callable[..., Any], ctx: ir.Context) -> fx.Graph:
    """The operators of `fn(*node.args, **node.kwargs)`, with a placeholder for each operand."""
    inputs = list(node.all_input_nodes)

    def over_tensors(*values: Any) -> Any:
        given = dict(zip(inputs, values))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: given[n])
        return fn(*args, **kwargs)

    # the same fake tensor twice would become one placeholder
    values = [ir.value(n) for n in inputs]
    distinct = [
        v.clone() if isinstance(v, torch.Tensor) and any(v is w for w in values[:i]) else v
        for i, v in enumerate(values)
    ]
    return trace(over_tensors, distinct, ctx)


def splice(node: fx.Node, body: fx.Graph, inputs: list[fx.Node]) -> list[fx.Node]:
    """Copy a graph's operators before the node, feed it `inputs`, and replace the node by its result."""
    with node.graph.inserting_before(node):
        new, result = graft(node.graph, body, inputs)
    for inner in new:
        ir.copy_origin(inner, node)
    replace_uses(node, result)
    node.graph.erase_node(node)
    return new


def own_memory(nodes: list[fx.Node], ctx: ir.Context) -> None:
    """Let nodes copied from a graph record tensors that lie, and share memory, as theirs do, in memory of their own."""
    held: dict[torch.UntypedStorage, torch.UntypedStorage] = {}

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        old = tensor.untyped_storage()
        if old not in held:
            new = Layout.of(tensor).empty()
            held[old] = new.untyped_storage()
            return new
        place = held[old], tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)  # type: ignore[call-overload]

    with ctx.fake_mode, torch.no_grad():
        for node in nodes:
            ir.set_value(node, map_values(ir.value(node), fresh, torch.Tensor))


def graft(graph: fx.Graph, body: fx.Graph, inputs: list[fx.Node]) -> tuple[list[fx.Node], Any]:
    """Copy a graph's operators to where `graph` inserts now; returns the new nodes and what the body returns."""
    env: dict[fx.Node, Any] = dict(zip((n for n in body.nodes if n.op == "placeholder"), inputs))
    new: list[fx.Node] = []
    for inner in body.nodes:
        if inner.op == "output":
            return new, fx.map_arg(inner.args[0], lambda n: env[n])
        if inner.op != "placeholder":
            env[inner] = ir.copy_node(graph, inner, env)
            ir.set_record(env[inner], NodeRecord(ir.value(inner)))
            new.append(env[inner])
    raise AssertionError("a graph ends with its output")


def replace_uses(node: fx.Node, result: Any) -> None:
    """Let the users of a node use `result` instead: a node, or a tuple whose parts replace its getitems."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
        return
    for user in list(node.users):
        user.replace_all_uses_with(result[user.args[1]])
        user.graph.erase_node(user)


def move_before(node: fx.Node, target: fx.Node) -> None:
    """Move a node that comes after the target, and with it what it reads, to right before the target."""
    waiting = [(node, target)]  # a stack of our own: chains are as long as programs are
    while waiting:
        node, target = waiting.pop()
        if target < node:
            target.prepend(node)
            waiting += [(operand, node) for operand in reversed(node.all_input_nodes)]


def move_after(node: fx.Node, target: fx.Node) -> None:
    """Move a node that comes before the target, and with it its users, to right after the target."""
    waiting = [(node, target)]
    while waiting:
        node, target = waiting.pop()
        if node < target:
            target.append(node)
            waiting += [(user, node) for user in reversed(node.users)]
