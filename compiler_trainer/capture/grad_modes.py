"""Write into a graph which values have a gradient: as autograd recorded it, region by region.

    _set_grad_enabled(False)
    %n = to(%y, float32)          nothing to cast: %n is %y, which keeps its gradient
    %m = mean(%n)                 ->  %d = detach(%y), %m = mean(%d)
    mul_(%y, 0.5)                 ->  copy_(%y, write(%y, %y * 0.5)), whose gradient is that of the earlier %y
    _set_grad_enabled(True)

`torch.export` records where gradients are switched on and off, but the functional graph would lose this. A tensor that
leaves a region is detached only if it was created there: an operator may return its operand itself. A write into memory
that a value with a gradient shares (`detach`, `.data`, a view made in a region) changes the entries and keeps the
gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from compiler_trainer.config.errors import UserError
from passes.ir import ir
from passes.ir.operators import bind, is_mutable
from passes.torch_private import SET_GRAD_ENABLED, FakeTensor, OpOverload, is_composite
from passes.trace import functions

aten = torch.ops.aten
DETACHES = (aten.detach.default, aten.detach_.default)


def write_gradients(graph: fx.Graph, trained: Collection[fx.Node]) -> None:
    """Detach values that autograd did not follow; changes the graph.

    `trained` are the placeholders of trained parameters. Raises UserError naming the line of a write that would give
    one memory two gradients.
    """
    histories = Histories(graph, trained)
    for node in list(graph.nodes):
        if node.target is SET_GRAD_ENABLED:
            histories.switch(node.args[0])
            graph.erase_node(node)
        elif node.op == "call_function":
            histories.follow(node)


class Histories:
    """The values that autograd follows, and the memory that they share, up to the current node."""

    def __init__(self, graph: fx.Graph, trained: Collection[fx.Node]):
        self.graph, self.enabled = graph, True
        self.order = {node: number for number, node in enumerate(graph.nodes)}
        self.followed = set(trained)  # values with a gradient; views have their base's
        self.bases: dict[fx.Node, fx.Node] = {}  # a view -> the value whose gradient it has
        self.sources: dict[fx.Node, fx.Node] = {}  # a detached value -> the value with the same memory and a gradient
        self.cuts: dict[fx.Node, fx.Node] = {}  # a value -> its detached alias in this region

    def switch(self, enabled: bool) -> None:
        """Begin a region."""
        self.enabled, self.cuts = enabled, {}

    def has_gradient(self, node: fx.Node) -> bool:
        """Return True if autograd follows a value."""
        return self.bases.get(node, node) in self.followed

    def follow(self, node: fx.Node) -> None:
        """Record the values that a node creates or writes, and detach operands for which it has no gradient."""
        if node.target in DETACHES:
            self.follow_detach(node, *node.all_input_nodes)
        elif is_mutable(node):
            self.follow_write(node)
        elif operand := same_value(node):
            node.replace_all_uses_with(operand)
            self.graph.erase_node(node)
        else:
            self.follow_value(node)

    def follow_detach(self, node: fx.Node, operand: fx.Node) -> None:
        """Record a detached value, unless there is nothing to detach and no other node reads the memory."""
        node.target = aten.detach.default
        if self.has_gradient(operand) or operand in self.sources or operand in self.bases or len(operand.users) > 1:
            self.sources[node] = self.sources.get(operand, operand)

    def follow_value(self, node: fx.Node) -> None:
        """Record a new value or a view."""
        if not is_graded(node):
            return
        viewed = next((operand for operand in node.all_input_nodes if shares_memory(node, operand)), None)
        for operand in node.all_input_nodes if not self.enabled else ():
            if ir.is_tensor(operand) and is_graded(operand) and (operand is viewed or self.has_gradient(operand)):
                node.replace_input_with(operand, detached := self.detached(operand, node))
                viewed = detached if operand is viewed else viewed
        if viewed is None:
            self.followed |= {node for operand in node.all_input_nodes if self.has_gradient(operand)}
            return
        self.bases[node] = self.bases.get(viewed, viewed)
        if source := self.sources.get(viewed):
            with self.graph.inserting_after(node):
                view = self.graph.node_copy(node, lambda n: source if n is viewed else n)
            self.sources[node], self.bases[view] = view, self.bases.get(source, source)

    def follow_write(self, node: fx.Node) -> None:
        """Record a write; if autograd does not follow it, the written value keeps its gradient."""
        target = write_target(node)
        source = self.sources.get(target, target)
        operands_read = {n for n in read_operands(node) if is_graded(n) and self.has_gradient(n)}
        if self.enabled and source is not target and operands_read and self.is_read_after(node, target):
            problem = "writes a value that has a gradient into memory that is shared with a detached tensor"
            raise UserError("model", f"{ir.source(node)} {problem}; clone the tensor first (x.detach().clone())")
        if self.enabled and source is target:
            self.followed |= {self.bases.get(target, target)} if operands_read else set()
            self.bases[node] = self.bases.get(target, target)
            return
        for operand in operands_read:
            replace_read(node, operand, self.detached(operand, node))
        if self.has_gradient(source):
            self.keep_gradient(node, target, source)
        node.replace_all_uses_with(target, lambda user: user.target is not self.write)

    def is_read_after(self, node: fx.Node, target: fx.Node) -> bool:
        """Return True if a later node reads the detached value that a node writes into, or a view of it."""
        base = self.bases.get(target, target)
        views = [base, node, *(view for view, viewed in self.bases.items() if viewed is base)]
        return any(self.order.get(user, 0) > self.order[node] for view in views for user in view.users)

    def keep_gradient(self, node: fx.Node, target: fx.Node, source: fx.Node) -> None:
        """Make a node write into a copy, and give `source` the result with its own gradient."""
        detached = self.detached(target, node)
        with self.graph.inserting_before(node):
            copy = copy_meta(self.graph.call_function(aten.clone.default, (detached,)), target, node)
        with self.graph.inserting_after(node):
            value = copy_meta(self.graph.call_function(self.write, (source, node)), source, node)
        with self.graph.inserting_after(value):
            copy_meta(self.graph.call_function(aten.copy_.default, (source, value)), source, node)
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copy if n is target else n)

    def detached(self, operand: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the detached value; a value that is already detached is returned itself."""
        if operand in self.sources:
            return operand
        if operand not in self.cuts:
            with self.graph.inserting_before(reader):
                result = copy_meta(self.graph.call_function(aten.detach.default, (operand,)), operand, reader)
            self.cuts[operand], self.sources[result] = result, operand
        return self.cuts[operand]

    @cached_property
    def write(self) -> Any:
        """The operator that returns the second of two values, with the gradient of the first."""

        def forward(old: Tensor, new: Tensor) -> tuple[Tensor, ...]:
            return (new,)

        def backward(old: Tensor, new: Tensor, result: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
            return gradient, None

        operator = functions.define("fn", "write", forward, 2, 1)
        functions.record(operator, functions.Function("write", forward, backward, 1))
        return operator


def same_value(node: fx.Node) -> fx.Node | None:
    """Return the operand that an operator returns unchanged, such as a cast to the same dtype, or None."""
    if not isinstance(node.target, OpOverload) or not is_composite(node.target):
        return None
    result = ir.value(node)
    for operand in node.all_input_nodes:
        value = ir.value(operand)
        if isinstance(result, FakeTensor) and isinstance(value, FakeTensor) and layout_of(result) == layout_of(value):
            args, kwargs = fx.map_arg((node.args, node.kwargs), ir.value)
            with value.fake_mode:
                return operand if node.target(*args, **kwargs) is value else None
    return None


def layout_of(value: Tensor) -> tuple[Any, ...]:
    """Return the memory of a tensor, and the positions of its entries in it."""
    return value.untyped_storage(), value.dtype, value.shape, value.stride(), value.storage_offset()


def write_target(node: fx.Node) -> fx.Node:
    """Return the operand that an operator writes into; raise UserError if there are several."""
    names = [argument.name for argument in node.target._schema.arguments if argument.is_write]  # type: ignore[union-attr]
    targets = [bind(node).get(name) for name in names]
    if len(targets) != 1 or not isinstance(targets[0], fx.Node):
        raise UserError("model", f"{ir.source(node)} writes into several tensors at once; write into each by itself")
    return targets[0]


def read_operands(node: fx.Node) -> list[fx.Node]:
    """Return the nodes among a call's arguments, with repetitions, except the one that it writes into."""
    nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), nodes.append)
    nodes.remove(write_target(node))
    return nodes


def replace_read(node: fx.Node, old: fx.Node, new: fx.Node) -> None:
    """Replace an operand of a write in all positions where it is only read."""
    target, is_first = write_target(node), True

    def replaced(operand: fx.Node) -> fx.Node:
        nonlocal is_first
        is_written = operand is target and is_first
        is_first = is_first and not is_written
        return operand if is_written or operand is not old else new

    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), replaced)


def tensors_of(node: fx.Node) -> Iterator[Tensor]:
    """Yield the tensors that a node computes."""
    value = ir.value(node)
    return (v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, Tensor))


def is_graded(node: fx.Node) -> bool:
    """Return True if a node computes a tensor that can have a gradient."""
    return any(value.is_floating_point() or value.is_complex() for value in tensors_of(node))


def shares_memory(node: fx.Node, operand: fx.Node) -> bool:
    """Return True if a node returns a view of an operand."""
    return not memory_of(node).isdisjoint(memory_of(operand))


def memory_of(node: fx.Node) -> set[Any]:
    """Return the storages of a node's tensors; empty for tensors inside `vmap`."""
    return {value.untyped_storage() for value in tensors_of(node) if isinstance(value, FakeTensor)}


def copy_meta(node: fx.Node, value_source: fx.Node, origin: fx.Node) -> fx.Node:
    """Set a new node's record: the value of one node and the origin of another; return it."""
    ir.set_record(node, replace(ir.record(origin), value=ir.value(value_source)))
    return node
