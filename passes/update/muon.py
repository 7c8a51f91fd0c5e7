"""Muon (Jordan et al., 2024): the update of a matrix is its momentum, orthogonalized.

    u_1 .. u_8 [m@dp_shard, n]        the directions of eight weights, in shards
    stack      [8, m@dp_shard, n]
    exchange   [8@dp_shard, m, n]     a rank has some of them, complete
    orthogonal                        five Newton-Schulz steps, each rank on its own
    exchange   [8, m@dp_shard, n]

Momentum and parameters stay in shards. Weights of more than two dims are stacks of matrices, a kernel is a matrix
of channels by the rest, and a weight whose product is cut into parts is several matrices (`ir.Parts`).
Directions have the size of AdamW's (Liu et al., arXiv 2502.16982), so that both use one learning rate and weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.spec import Factor, Spec
from passes.sharding.partition import GraphBuilder
from passes.update.appender import Appender
from passes.update.optimizers import Muon, cast
from passes.update.update import Added, Update

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: all singular values come near 1
EPS = 1e-7
SIZE = 0.2  # root mean square of AdamW's update


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """Return x[..., m, n] with singular values near 1, by Newton-Schulz steps, scaled to the size of AdamW's update."""
    rows, columns = x.shape[-2:]
    x = x.mT if rows > columns else x
    x = x / x.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if rows > columns else x) * (SIZE * math.sqrt(max(rows, columns)))


def orthogonal_parts(x: Tensor, parts: ir.Parts | None, is_kernel: bool) -> Tensor:
    """Return weights x[count, ...], each of their matrices orthogonalized.

    A kernel x[count, m, ...] is one matrix [m, n]. Otherwise the last two dims are a matrix, or `parts` of it are.
    """
    if is_kernel:
        return orthogonal(x.flatten(2)).reshape(x.shape)
    if parts is None:
        return orthogonal(x)
    rows = x.mT if parts.dim == -1 else x
    blocks = rows.unflatten(-2, (parts.outer, sum(parts.sizes), parts.inner)).split(parts.sizes, -3)
    done = [orthogonal(block.flatten(-4, -2)).unflatten(-2, block.shape[-4:-1]) for block in blocks]
    rows = torch.cat(done, -3).flatten(-4, -2)
    return rows.mT if parts.dim == -1 else rows


@dataclass(frozen=True)
class Matrix:
    """A weight that Muon updates, with the operands of its update."""

    update: Update
    parameter: fx.Node
    gradient: fx.Node
    shared: Sequence[fx.Node]  # the gradients' factor and the optimizer's scalars


def append_muon(
    append: Appender, matrices: Sequence[Matrix], step: fx.Node, coordinates: Mapping[str, fx.Node]
) -> Added:
    """Update all weights of Muon; equally placed ones together."""
    added: Added = []
    by_kind: dict[tuple[object, ...], list[tuple[Matrix, fx.Node]]] = {}
    for matrix in matrices:
        direction, moments = direction_of(append, matrix)
        added += moments
        update = matrix.update
        form = update.input.parts, is_kernel(update.input)
        kind = (update.spec.dims, ir.example(direction).dtype, update.group, *form)
        by_kind.setdefault(kind, []).append((matrix, direction))
    for members in by_kind.values():
        update = members[0][0].update
        directions = [node for _, node in members]
        updates = orthogonalize(append, update, directions, coordinates)
        for (matrix, _), new in zip(members, updates, strict=True):
            store(append, matrix, new, step, coordinates)
    append.parameter = ""
    return added


def direction_of(append: Appender, matrix: Matrix) -> tuple[fx.Node, Added]:
    """Return the direction of a weight before orthogonalization; write its momentum."""
    update, muon = matrix.update, matrix.update.group.optimizer
    assert isinstance(muon, Muon)
    append.parameter = update.input.name

    def direction(g: Tensor, factor: Tensor, moments: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        ahead, new = muon.direction(cast(g, update.wide) * factor, moments)
        return cast(ahead, muon.dtype or update.dtype), new

    return update.advance(append, "direction", direction, (matrix.gradient, matrix.shared[0]), matrix.parameter)


def is_kernel(parameter: ir.Input) -> bool:
    """Return True for the kernel of a convolution, in which all dims but the first are one."""
    return "convolution" in parameter.roles


def orthogonalize(
    append: Appender, update: Update, directions: Sequence[fx.Node], coordinates: Mapping[str, fx.Node]
) -> Sequence[fx.Node]:
    """Return directions of weights like that of `update`, orthogonalized: ranks divide, exchange and return them."""
    append.parameter = ""
    spec, mesh, parts, kernel = update.spec, update.mesh, update.input.parts, is_kernel(update.input)
    first = 0 if kernel else len(spec.dims) - 2
    count, *stack = len(directions), *spec.dims[:first]
    axes = tuple(axis for dim in spec.dims[first:] for factor in dim for axis in factor.axes)
    unsharded = tuple(tuple(replace(factor, axes=()) for factor in dim) for dim in spec.dims[first:])
    stacked = replace(spec, dims=((Factor(count),), *spec.dims), fill=0.0)
    divided = replace(stacked, dims=((Factor(count, axes),), *stack, *unsharded))
    x = append.trace(lambda *x: torch.stack(x), *directions, key=("stack", count))
    x = convert(append, mesh, x, stacked, divided, coordinates)
    x = append.trace(lambda x: orthogonal_parts(x, parts, kernel), x, key=("orthogonal", parts, kernel))
    x = convert(append, mesh, x, divided, stacked, coordinates)
    return append.trace(lambda x: tuple(t.clone() for t in x.unbind()), x, key=("unbind", count))


def convert(
    append: Appender, mesh: Mesh, x: fx.Node, before: Spec, after: Spec, coordinates: Mapping[str, fx.Node]
) -> fx.Node:
    """Return a value in another placement."""
    builder = GraphBuilder(mesh, append.ctx)
    start = builder.placeholder("x", ir.example(x), before)
    for axis, node in coordinates.items():
        builder.coordinates[axis] = builder.placeholder(f"axis_index_{axis}", ir.example(node), Spec(()))
    builder.graph.output(builder.convert(start, before, after, has_grad=False))
    return append.graft(builder.graph, [x, *coordinates.values()])[1]


def store(
    append: Appender, matrix: Matrix, direction: fx.Node, step: fx.Node, coordinates: Mapping[str, fx.Node]
) -> None:
    """Change a weight along its orthogonal direction."""
    update, (_, *scalars) = matrix.update, matrix.shared
    append.parameter = update.input.name

    def move(p: Tensor, direction: Tensor, *values: Tensor) -> Tensor:
        factors, placed = values[: len(scalars)], values[len(scalars) :]
        new, _ = update.group.optimizer.update(cast(p, update.wide), cast(direction, update.wide), (), factors)
        return update.round(new, placed)

    key = ("move", update.group.optimizer, update.dtype, *update.identity())
    inputs = (matrix.parameter, direction, *scalars, *update.place_operands(step, coordinates))
    append.keep(matrix.parameter, append.trace(move, *inputs, key=key))
