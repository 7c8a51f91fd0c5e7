"""The lockstep simulator: all ranks' local programs in one process, values exchanged at the collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from passes.ir import ir
from passes.ir.bodies import flatten
from passes.ir.mesh import BLOCKS, Mesh
from passes.ir.operators import axis_of
from passes.ir.order import PLAIN, Order
from passes.ops.shift import arrive, hops_at, shift, shift_by
from passes.torch_private import c10d
from passes.trace.abstract_eval import laid_out

Values = list[Tensor]


def _all_gather(values: Values, parts: int, axis: str) -> Values:
    return [torch.cat(values) for _ in values]


def _add_in_turn(values: Values) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total = total + value
    return total


def _reduce(values: Values, kind: str) -> Tensor:
    if kind == "max":
        return torch.stack(values).amax(0)
    if kind == "sum":
        return _add_in_turn(values)
    raise ValueError(f"reduction {kind!r} is not simulated")


def _all_reduce(values: Values, kind: str, axis: str) -> Values:
    total = _reduce(values, kind)
    return [total.clone() for _ in values]


def _reduce_scatter(values: Values, kind: str, parts: int, axis: str) -> Values:
    return [part.clone() for part in _reduce(values, kind).chunk(parts)]


def _all_to_all(values: Values, outs: list[int], ins: list[int], axis: str) -> Values:
    pieces = [value.split(ins) for value in values]
    return [torch.cat([pieces[j][i] for j in range(len(values))]) for i in range(len(values))]


def _shift(values: Values, axis: str, by: int) -> Values:
    return [values[i - by].clone() for i in range(len(values))]


def _shift_by(values: Values, hops: Tensor, axis: str, row: int, step: int, home: bool) -> Values:
    return _shift(values, axis, hops_at(hops, row, step, home, len(values)))


# operator -> function from the values of a group's ranks before it to those after it
COLLECTIVES: dict[Any, Callable[..., Values]] = {
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.all_reduce.default: _all_reduce,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_to_all_single.default: _all_to_all,
    shift: _shift,
    shift_by: _shift_by,
}


class Lockstep(fx.Interpreter):
    """Interprets one local program for every rank, node by node; the environment has lists of the ranks' values.

    Errors name the node and its line.
    """

    def __init__(self, program: ir.Program):
        self.program, self.mesh = (program := flatten(program)), program.mesh
        super().__init__(program.module)
        self.extra_traceback = False

    def run(self, inputs_by_rank: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:  # type: ignore[override]
        """Return every rank's outputs for every rank's inputs; keep no value."""
        try:
            return super().run(*zip(*inputs_by_rank, strict=True), enable_io_processing=False)
        finally:
            self.args_iter, self.env = iter(()), {}

    def run_node(self, node: fx.Node) -> Any:
        """Return the ranks' values of a node."""
        if node.op == "output":
            return self.by_rank(node.args[0])
        return self.step(node) if node.op == "call_function" else super().run_node(node)

    def by_rank(self, tree: Any) -> list[Any]:
        """Return a tree of nodes with each rank's values in their places."""
        return [fx.map_arg(tree, lambda node, r=rank: self.env[node][r]) for rank in range(self.mesh.world_size)]

    def step(self, node: fx.Node) -> list[Any]:
        """Run one operator on all ranks."""
        arguments = self.by_rank((node.args, node.kwargs))
        try:
            if node.target in COLLECTIVES:
                return self.exchange(node, [args for args, _ in arguments])
            if node.target in (c10d.wait_tensor.default, arrive):
                return [args[0] for args, _ in arguments]
            if "c10d" in str(node.target):
                raise ValueError(f"{node.target} is not simulated")
            return [laid_out(node.target(*args, **kwargs), ir.value(node)) for args, kwargs in arguments]  # type: ignore
        except Exception as error:
            raise ir.CompileError("lockstep", node, f"{type(error).__name__}: {error}") from error

    def exchange(self, node: fx.Node, arguments: list[tuple]) -> list[Any]:
        """Run one collective: each group of the axis exchanges its values."""
        results: list[Any] = [None] * self.mesh.world_size
        for group in self.mesh.groups(str(axis_of(node))):
            outputs = COLLECTIVES[node.target]([arguments[r][0] for r in group], *arguments[group[0]][1:])
            for rank, value in zip(group, outputs, strict=True):
                results[rank] = value
        return results


def coordinate(mesh: Mesh, rank: int, input_: ir.Input, order: Order = PLAIN) -> Tensor:
    """Return a rank's coordinate on an axis (0-d int64), the table of an order, or hops that skip no step."""
    if input_.kind == "coordinate":
        return torch.tensor(mesh.coordinates(rank)[input_.name])
    return torch.tensor(order.table) if input_.name == BLOCKS else torch.ones(input_.spec.shape, dtype=torch.int64)
