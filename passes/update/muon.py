"""Muon (Jordan et al., 2024): the update of a matrix is its momentum, orthogonalized.

    u_1 .. u_8 [m@dp_shard, n]        the directions of eight weights, in shards
    stack      [8, m@dp_shard, n]
    exchange   [8@dp_shard, m, n]     a rank has some of them, complete
    orthogonal                        five Newton-Schulz steps, each rank on its own
    exchange   [8, m@dp_shard, n]

Momentum and parameters stay in shards. Weights of more than two dims are stacks of matrices. Directions have the size
of AdamW's (Liu et al., arXiv 2502.16982), so that both use one learning rate and weight decay.
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
from passes.update.optimizers import Moment, cast
from passes.update.update import Added, Update

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: all singular values come near 1
EPS = 1e-7
SIZE = 0.2  # root mean square of AdamW's update


@dataclass(frozen=True)
class Muon:
    """Orthogonalized Nesterov momentum, computed in `dtype` (None: the parameter's), and decoupled weight decay."""

    momentum: float = 0.95
    weight_decay: float = 0.0
    dtype: torch.dtype | None = None
    moments: tuple[Moment, ...] = (Moment("momentum"),)

    def scalars(self, lr: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        """Return the factor that decays the parameter, and the rate."""
        return 1 - lr * self.weight_decay, lr

    def direction(self, gradient: Tensor, moments: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the momentum one step ahead, and the momentum."""
        (moment,) = moments
        moment = moment + (1 - self.momentum) * (gradient - moment)
        return gradient + self.momentum * (moment - gradient), (moment,)

    def update(
        self, parameter: Tensor, gradient: Tensor, moments: tuple[Tensor, ...], scalars: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the new parameter, given an orthogonal direction."""
        decay, rate = scalars
        return parameter * decay - rate * gradient, moments


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
        by_kind.setdefault((update.spec.dims, ir.example(direction).dtype, update.group), []).append(
            (matrix, direction)
        )
    for members in by_kind.values():
        update = members[0][0].update
        directions = [node for _, node in members]
        updates = orthogonalize(append, update.spec, update.mesh, directions, coordinates)
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


def orthogonalize(
    append: Appender, spec: Spec, mesh: Mesh, directions: Sequence[fx.Node], coordinates: Mapping[str, fx.Node]
) -> Sequence[fx.Node]:
    """Return equally placed directions, orthogonalized: ranks divide them, exchange, and return them."""
    append.parameter = ""
    count, *stack = len(directions), *spec.dims[:-2]
    axes = tuple(axis for dim in spec.dims[-2:] for factor in dim for axis in factor.axes)
    unsharded = tuple(tuple(replace(factor, axes=()) for factor in dim) for dim in spec.dims[-2:])
    stacked = replace(spec, dims=((Factor(count),), *spec.dims), fill=0.0)
    divided = replace(stacked, dims=((Factor(count, axes),), *stack, *unsharded))
    x = append.trace(lambda *x: torch.stack(x), *directions, key=("stack", count))
    x = convert(append, mesh, x, stacked, divided, coordinates)
    x = append.trace(orthogonal, x, key="orthogonal")
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
        factors, drawn = values[: len(scalars)], values[len(scalars) :]
        new, _ = update.group.optimizer.update(cast(p, update.wide), cast(direction, update.wide), (), factors)
        return update.round(new, drawn)

    key = ("move", update.group.optimizer, update.dtype, *update.identity())
    inputs = (matrix.parameter, direction, *scalars, *update.random_operands(step, coordinates))
    append.keep(matrix.parameter, append.trace(move, *inputs, key=key))
