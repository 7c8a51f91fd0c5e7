"""Say once, of a captured graph, which layer each operator is of: what passes do by layer asks for nothing else.

A layer is a numbered module (`passes/program/layer.py`), whatever it calls. With it go:

    cast(weight)            what is computed from parameters alone, by no module, and read by one layer
    add(x, attention(x))    what stands between modules of one layer: of a model whose modules are the layers' parts
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache

from torch import fx

from passes.program.layer import Layer, layer_names, layer_of

Found = dict[fx.Node, Layer | None]
MARK = "layer"  # among the tracer's marks, which outlive the rewrite as a functional graph


def mark_layers(graph: fx.Graph, batch: Collection[fx.Node]) -> None:
    """Mark every operator with its layer, or with None; `batch` are the placeholders that differ from step to step."""
    paths = {node: called(node) for node in graph.nodes if node.op == "call_function"}
    found = by_module(paths)
    fill_between(found)
    adopt_weights(found, paths, batch)
    for node, layer in found.items():
        node.meta["custom"] = {**(node.meta.get("custom") or {}), MARK: layer}


def marked(node: fx.Node) -> Layer | None:
    """The layer that a node is marked with."""
    return (node.meta.get("custom") or {}).get(MARK)


def called(node: fx.Node) -> list[str]:
    """Paths of the modules that were being called when a node was made, as the model knows them, the innermost last."""
    stack = node.meta.get("nn_module_stack") or {}
    return [path.removeprefix("model").removeprefix(".") for path, _ in stack.values()]


def by_module(paths: Mapping[fx.Node, list[str]]) -> Found:
    """The layer of each node by the modules called: the outermost call counts, a layer may call parts of another."""
    names = layer_names({calls[-1] for calls in paths.values() if calls})
    layer = cache(lambda path: layer_of(path, names))
    return {node: next(filter(None, map(layer, calls)), None) for node, calls in paths.items()}


def adopt_weights(found: Found, paths: Mapping[fx.Node, list[str]], batch: Collection[fx.Node]) -> None:
    """Let what no module made and nothing of a batch is in be of the layer that reads it, if that is one."""
    data = set(batch)
    for node in found:
        if not data.isdisjoint(node.all_input_nodes):
            data.add(node)
    for node in reversed(found):
        users = {found.get(user) for user in node.users}
        if node not in data and not any(paths[node]) and len(users) == 1:
            found[node] = users.pop()


def fill_between(found: Found) -> None:
    """Let what is computed from a layer, and read by it again, be of that layer."""
    before, after = nearest(found, found, "all_input_nodes"), nearest(found, reversed(found), "users")
    for node, layer in found.items():
        if layer is None and (both := before[node] & after[node]):
            found[node] = max(both)


def nearest(found: Found, order: Iterable[fx.Node], neighbours: str) -> dict[fx.Node, frozenset[Layer]]:
    """The layers from which one comes to a node through none, by operands (or users) of nodes in order."""
    seen: dict[fx.Node, frozenset[Layer]] = {}
    for node in order:
        reached = (frozenset([layer]) if (layer := found.get(n)) else seen.get(n) for n in getattr(node, neighbours))
        seen[node] = frozenset().union(*filter(None, reached))
    return seen
