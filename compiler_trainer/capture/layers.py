"""Assign each operator of a captured graph to a layer, once: all passes that work by layer use this.

A layer is a numbered module (`passes/ir/layer.py`), whatever it calls; or, without numbered modules, a part of the
graph that repeats the previous part (`repeats.py`). These operators are added to a layer:

    cast(weight)            computed from parameters alone, by no module, and read by one layer
    add(x, attention(x))    between modules of one layer, in models whose modules are parts of layers
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import count, takewhile
from typing import Any

from torch import fx

from compiler_trainer.capture.grad_modes import memory_of
from compiler_trainer.capture.repeats import repeats
from passes.ir import ir
from passes.ir.layer import Layer, layer_names, layer_of
from passes.ir.operators import is_mutable

Layers = dict[fx.Node, Layer | None]
Reads = dict[fx.Node, list[fx.Node]]
Paths = Mapping[fx.Node, Sequence[str]]  # the modules called when a node was created, innermost last


def mark_layers(graph: fx.Graph, batch: Collection[fx.Node]) -> None:
    """Set the layer of every operator, or None; `batch` are the placeholders that differ from step to step."""
    paths = {node: ir.record(node).origin.modules for node in graph.nodes if node.op == "call_function"}
    reads = operands_and_writers(paths)
    layers, data = by_module(paths), depends_on_batch(reads, batch)
    mark_repeats(layers, paths, data)
    fill_between(layers, reads)
    adopt_weights(layers, paths, data)
    for node, layer in layers.items():
        ir.update(node, layer=layer)


def by_module(paths: Paths) -> Layers:
    """Return each node's layer from its modules: the outermost call counts, as a layer may call parts of another."""
    names = layer_names({calls[-1] for calls in paths.values() if calls})
    layer = cache(lambda path: layer_of(path, names))
    return {node: next(filter(None, map(layer, calls)), None) for node, calls in paths.items()}


def operands_and_writers(nodes: Iterable[fx.Node]) -> Reads:
    """Return each node's operands, and the operators that last wrote into the memory of these."""
    writes: dict[Any, fx.Node] = {}
    reads: Reads = {}
    for node in nodes:
        memory = [storage for operand in node.all_input_nodes for storage in memory_of(operand)]
        reads[node] = [*node.all_input_nodes, *(writes[storage] for storage in memory if storage in writes)]
        writes |= dict.fromkeys(memory_of(node), node) if is_mutable(node) else {}
    return reads


def depends_on_batch(reads: Reads, batch: Collection[fx.Node]) -> set[fx.Node]:
    """Return the operators that depend on a batch."""
    data = set(batch)
    for node, operands in reads.items():
        if not data.isdisjoint(operands):
            data.add(node)
    return data


def mark_repeats(layers: Layers, paths: Paths, data: Collection[fx.Node]) -> None:
    """Number repeating parts of the graph, if no module is numbered, or if the numbers are not of layers."""
    orders = orders_of(layers)
    repeated = {stack for stack, order in orders.items() if len(set(order)) < len(order)}
    if len(orders) == 1 and not repeated:
        return  # most models have one stack that runs once
    names = set(orders)
    for parts in repeats([node for node in layers if node in data], data):
        stacks_by_part = [{layer.stack for node in part if (layer := layers[node])} for part in parts]
        stacks = set().union(*stacks_by_part)
        if any(stack not in repeated and sum(stack in part for part in stacks_by_part) > 1 for stack in stacks):
            continue  # consecutive parts are numbered modules, each of them a layer
        layers |= {node: None for node, layer in layers.items() if layer and layer.stack in stacks}
        name = free_name(
            common_module([paths[node][-1] for part in parts for node in part if paths[node]]), names - stacks
        )
        names.add(name)
        layers |= {node: Layer(name, number) for number, part in enumerate(parts) for node in part}


def orders_of(layers: Layers) -> dict[str, list[int]]:
    """Return the order in which each stack's layers run: `[0, 1, 0, 1]` if it runs twice."""
    orders: dict[str, list[int]] = {}
    for layer in filter(None, layers.values()):
        order = orders.setdefault(layer.stack, [])
        if order[-1:] != [layer.number]:
            order.append(layer.number)
    return orders


def common_module(paths: Iterable[str]) -> str:
    """Return the innermost module that contains all paths, or `repeat` if that is the model."""
    parts = takewhile(lambda level: len(set(level)) == 1, zip(*(path.split(".") for path in paths if path)))
    return ".".join(level[0] for level in parts) or "repeat"


def free_name(name: str, names: Collection[str]) -> str:
    """Return the name, with a number if it is taken."""
    return next(candidate for i in count(1) if (candidate := name if i == 1 else f"{name}{i}") not in names)


def adopt_weights(layers: Layers, paths: Paths, data: Collection[fx.Node]) -> None:
    """Assign nodes without a module that do not depend on a batch to the only layer that reads them."""
    for node in reversed(layers):
        users = {layers.get(user) for user in node.users}
        if node not in data and not any(paths[node]) and len(users) == 1:
            layers[node] = users.pop()


def fill_between(layers: Layers, reads: Reads) -> None:
    """Assign nodes that are computed from a layer, and read by it again, to that layer."""
    users: Reads = {node: [] for node in layers}
    for node, operands in reads.items():
        for operand in operands:
            users.setdefault(operand, []).append(node)
    layers_before, layers_after = nearest(layers, layers, reads), nearest(layers, reversed(layers), users)
    for node, layer in layers.items():
        if layer is None and (layers_around := layers_before[node] & layers_after[node]):
            layers[node] = max(layers_around)


def nearest(layers: Layers, order: Iterable[fx.Node], neighbours: Reads) -> dict[fx.Node, frozenset[Layer]]:
    """Return the layers that reach each node through nodes without a layer, by `neighbours`: operands or users.

    `order` lists the nodes such that neighbours come first.
    """
    reachable: dict[fx.Node, frozenset[Layer]] = {}
    for node in order:
        sources = (frozenset([layer]) if (layer := layers.get(n)) else reachable.get(n) for n in neighbours[node])
        reachable[node] = frozenset().union(*filter(None, sources))
    return reachable
