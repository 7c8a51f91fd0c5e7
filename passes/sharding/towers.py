"""Find the tower of a model that sees: the operators that read images of a batch and no tokens, and their weights.

    pixels [4@dp_shard, 2, 3, 16, 16]          entries of a batch with more dims than those of tokens
    tokens [4@dp_shard, 64]

To split a tower's weights over `tp` sends activations in each layer. Instead, ranks of `tp` may share the images, which
needs one gather of the features after the tower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.spec import Spec


@dataclass(frozen=True)
class Tower:
    """The names of the entries of a batch that are images, and of the parameters that only meet these."""

    entries: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()


def tower_of(program: ir.Program) -> Tower:
    """Return the tower of a captured program; an empty one if it reads no images."""
    inputs = dict(zip(program.placeholders(), program.inputs, strict=True))
    batch = {node for node, item in inputs.items() if item.kind == "batch"}
    images = {node for node in batch if len(inputs[node].spec.shape) > 2}
    if not batch - images:
        return Tower()
    from_images, from_tokens = reached(program, images), reached(program, batch - images)
    reads = from_images | from_tokens
    inside = from_images - from_tokens
    weights = {node for node, item in inputs.items() if item.kind in ir.WEIGHTS}
    users: dict[fx.Node, set[fx.Node]] = {}  # of weights, and of what is made of weights alone
    for node in reversed([*weights, *program.calls()]):
        if node not in reads:
            users[node] = set().union(*(users.get(user, {user}) for user in node.users))
    names = (inputs[node].name for node in weights if users[node] and users[node] <= inside)
    return Tower(frozenset(inputs[node].name for node in images), frozenset(names))


def reached(program: ir.Program, starts: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes from which some value flows, and all nodes that it reaches."""
    nodes = set(starts)
    for node in program.calls():
        if not nodes.isdisjoint(node.all_input_nodes):
            nodes.add(node)
    return nodes


def dim_to_share(spec: Spec, mesh: Mesh, axis: str) -> int:
    """Return the dim of images whose even split over one more axis wastes least: samples, or images of a sample."""

    def waste(d: int) -> float:
        (factor,) = spec.dims[d]
        each = math.ceil(factor.size / math.prod(mesh[name] for name in factor.axes))
        return math.ceil(each / mesh[axis]) * mesh[axis] / each

    return min(range(2), key=waste)
