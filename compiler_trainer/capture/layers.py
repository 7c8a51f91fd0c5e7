"""Say once, of a captured graph, which layer each operator is of: what passes do by layer asks for nothing else.

A layer is a numbered module (`passes/program/layer.py`), whatever it calls; or, where modules tell none, a part of the
graph that repeats the one before (`repeats.py`). With it go:

    cast(weight)            what is computed from parameters alone, by no module, and read by one layer
    add(x, attention(x))    what stands between modules of one layer: of a model whose modules are the layers' parts
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import count, takewhile
from typing import Any

from torch import fx

from compiler_trainer.capture.grad_modes import memory_of
from compiler_trainer.capture.repeats import repeats
from passes.program import ir
from passes.program.layer import Layer, layer_names, layer_of
from passes.program.operators import is_mutable

Found = dict[fx.Node, Layer | None]
Reads = dict[fx.Node, list[fx.Node]]
Paths = Mapping[fx.Node, Sequence[str]]  # the modules called when a node was made, the innermost last


def mark_layers(graph: fx.Graph, batch: Collection[fx.Node]) -> None:
    """Set the layer of every operator, or None; `batch` are the placeholders that differ from step to step."""
    paths = {node: ir.record(node).origin.modules for node in graph.nodes if node.op == "call_function"}
    reads = read_by(paths)
    found, data = by_module(paths), through(reads, batch)
    mark_repeats(found, paths, data)
    fill_between(found, reads)
    adopt_weights(found, paths, data)
    for node, layer in found.items():
        ir.update(node, layer=layer)


def by_module(paths: Paths) -> Found:
    """The layer of each node by the modules called: the outermost call counts, a layer may call parts of another."""
    names = layer_names({calls[-1] for calls in paths.values() if calls})
    layer = cache(lambda path: layer_of(path, names))
    return {node: next(filter(None, map(layer, calls)), None) for node, calls in paths.items()}


def read_by(nodes: Iterable[fx.Node]) -> Reads:
    """The operands of each node, with the operator that wrote into their memory last."""
    writes: dict[Any, fx.Node] = {}
    reads: Reads = {}
    for node in nodes:
        memory = [storage for operand in node.all_input_nodes for storage in memory_of(operand)]
        reads[node] = [*node.all_input_nodes, *(writes[storage] for storage in memory if storage in writes)]
        writes |= dict.fromkeys(memory_of(node), node) if is_mutable(node) else {}
    return reads


def through(reads: Reads, batch: Collection[fx.Node]) -> set[fx.Node]:
    """The operators that something of a batch goes through."""
    data = set(batch)
    for node, operands in reads.items():
        if not data.isdisjoint(operands):
            data.add(node)
    return data


def mark_repeats(found: Found, paths: Paths, data: Collection[fx.Node]) -> None:
    """Number parts of the graph that repeat: where no module is numbered, or numbers are not of layers."""
    orders = orders_of(found)
    again = {stack for stack, order in orders.items() if len(set(order)) < len(order)}
    if len(orders) == 1 and not again:
        return  # as most models are: one stack, run through once
    names = set(orders)
    for parts in repeats([node for node in found if node in data], data):
        inside = [{layer.stack for node in part if (layer := found[node])} for part in parts]
        stacks = set().union(*inside)
        if any(stack not in again and sum(stack in part for part in inside) > 1 for stack in stacks):
            continue  # numbered modules are parts in a row, each of them a layer
        found |= {node: None for node, layer in found.items() if layer and layer.stack in stacks}
        name = unused(common([paths[node][-1] for part in parts for node in part if paths[node]]), names - stacks)
        names.add(name)
        found |= {node: Layer(name, number) for number, part in enumerate(parts) for node in part}


def orders_of(found: Found) -> dict[str, list[int]]:
    """In which order the layers of each stack are run through: `[0, 1, 0, 1]` if twice."""
    orders: dict[str, list[int]] = {}
    for layer in filter(None, found.values()):
        order = orders.setdefault(layer.stack, [])
        if order[-1:] != [layer.number]:
            order.append(layer.number)
    return orders


def common(paths: Iterable[str]) -> str:
    """The module that all are in, `repeat` if that is the model."""
    parts = takewhile(lambda level: len(set(level)) == 1, zip(*(path.split(".") for path in paths if path)))
    return ".".join(level[0] for level in parts) or "repeat"


def unused(name: str, names: Collection[str]) -> str:
    """The name, with a number if it is taken."""
    return next(each for i in count(1) if (each := name if i == 1 else f"{name}{i}") not in names)


def adopt_weights(found: Found, paths: Paths, data: Collection[fx.Node]) -> None:
    """Let what no module made and nothing of a batch is in be of the layer that reads it, if that is one."""
    for node in reversed(found):
        users = {found.get(user) for user in node.users}
        if node not in data and not any(paths[node]) and len(users) == 1:
            found[node] = users.pop()


def fill_between(found: Found, reads: Reads) -> None:
    """Let what is computed from a layer, and read by it again, be of that layer."""
    users: Reads = {node: [] for node in found}
    for node, operands in reads.items():
        for operand in operands:
            users.setdefault(operand, []).append(node)
    before, after = nearest(found, found, reads), nearest(found, reversed(found), users)
    for node, layer in found.items():
        if layer is None and (both := before[node] & after[node]):
            found[node] = max(both)


def nearest(found: Found, order: Iterable[fx.Node], neighbours: Reads) -> dict[fx.Node, frozenset[Layer]]:
    """The layers from which one comes to a node through none, by operands (or users) of nodes in order."""
    seen: dict[fx.Node, frozenset[Layer]] = {}
    for node in order:
        reached = (frozenset([layer]) if (layer := found.get(n)) else seen.get(n) for n in neighbours[node])
        seen[node] = frozenset().union(*filter(None, reached))
    return seen
