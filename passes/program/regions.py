"""The layers of a model, found in the module paths that nodes carry, whatever the model calls them.

    layers.3.attention.wq   ->   layers.3
    layers.3.experts.0.w1   ->   layers.3
    norm                    ->   ""

A layer is a numbered child that has siblings; of layers inside layers the outermost counts. What is computed
from parameters alone (a cast of a weight, say) and has no module of its own belongs where it is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import fx

from passes.program import ir
from passes.program.rolls import Roll, number_in


def layer_paths(paths: Iterable[str]) -> set[str]:
    """Prefixes of module paths that end in a number and have siblings that do."""
    children: dict[str, set[str]] = {}
    for path in paths:
        parts = path.split(".")
        for i, part in enumerate(parts):
            if part.isdecimal():
                children.setdefault(".".join(parts[:i]), set()).add(".".join(parts[: i + 1]))
    return {child for siblings in children.values() if len(siblings) > 1 for child in siblings}


def region_of(path: str, layers: set[str]) -> str:
    """The outermost layer that a module path lies in, or an empty string."""
    parts = path.split(".")
    prefixes = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((prefix for prefix in prefixes if prefix in layers), "")


def within(path: str, pattern: str) -> bool:
    """Whether a module path, or a module around it, is named like the pattern."""
    parts = path.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def regions(program: ir.Program) -> dict[fx.Node, str]:
    """The layer of each operator node, an empty string outside of layers."""
    paths = {node: ir.module_path(node) for node in program.calls()}
    layers = layer_paths(set(paths.values()))
    region = {path: region_of(path, layers) for path in set(paths.values())}
    found = {node: region[path] for node, path in paths.items()}
    for node in reversed(weight_nodes(program)):
        users = {found[user] for user in node.users if user in found and ir.phase(user) == ir.phase(node)}
        if not paths[node] and len(users) == 1:
            found[node] = users.pop()
    return found


def numbers_of(program: ir.Program, roll: Roll) -> dict[fx.Node, int | None]:
    """The number of each node's layer in a stack, by an input's name, the parameter that is updated, or the region."""
    found = {n: number_in(i.name, roll.stack) for n, i in zip(program.placeholders(), program.inputs, strict=True)}
    for node, layer in regions(program).items():
        found[node] = number_in(ir.parameter(node) or layer, roll.stack)
    return {node: found.get(node) for node in program.graph.nodes}


def weight_nodes(program: ir.Program) -> list[fx.Node]:
    """Operator nodes computed from parameters, coordinates and constants alone, in order."""
    kinds = {node: given.kind for node, given in zip(program.placeholders(), program.inputs, strict=True)}
    weights = {node for node, kind in kinds.items() if kind == "parameter"}
    constants = {node for node, kind in kinds.items() if kind == "coordinate"}
    found = []
    for node in program.calls():
        read = set(node.all_input_nodes) - constants
        if not read:
            constants.add(node)
        elif read <= weights:
            weights.add(node)
            found.append(node)
    return found
