"""Give gradient reductions, exchanges and rings their own communicator if their axis carries other values too.

    all_gather_into_tensor(w, 4, "fsdp")             all_gather_into_tensor(w, 4, "fsdp")
    reduce_scatter_tensor(g, "sum", 4, "fsdp")  ->   reduce_scatter_tensor(g, "sum", 4, "fsdp:gradients")
    all_to_all_single(x, [..], [..], "ep")           all_to_all_single(x, [..], [..], "ep:exchanges")
    shift(k, "cp", 1)                                shift(k, "cp:ring", 1)

One communicator sends its collectives one after another; two communicators send side by side. So gathers of the next
layer's parameters do not queue behind gradients, for which no operator waits. Rows of experts, or heads, do not queue
behind those gathers, which are in flight for a whole layer: otherwise no chunk of rows would travel next to the matmuls
of another chunk. A step of a ring is hidden by one block of attention, or of a matmul, so it should queue behind
nothing else. A communicator costs memory, so an axis that carries only gradients (`dp_replicate`) keeps one, and
scalars (losses, norms) never need another. All ranks run this program, so collectives have the same order within and
between communicators on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from passes.communication.layer_starts import gradient_tails, kernels_of
from passes.ir import ir
from passes.ir.operators import EXCHANGES, GRADIENTS, RING, axis_of, kind_of
from passes.ir.slices import weight_nodes
from passes.ir.stages import Stage

REDUCTIONS = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Communicators(ir.Pass):
    """Name the communicator of each gradient reduction, each exchange, and each step of a ring."""

    name = "communicators"
    takes = (Stage.EXPLICIT,)
    keeps = True

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        if not any(map(kind_of, program.calls())):
            return program, ir.Report({"reductions": 0, "exchanges": 0, "rings": 0, "apart": 0})
        program = program.copy()
        tensors = [node for node in program.calls() if kind_of(node) and not is_scalar(node)]
        reductions = gradient_reductions(program, tensors)
        other_axes = {axis_of(node) for node in tensors if node not in reductions}
        weights = set(weight_nodes(program))
        gathered = {axis_of(node) for node in tensors if kind_of(node) == "all_gather" and node in weights}
        exchanges = [node for node in tensors if kind_of(node) == "all_to_all" and axis_of(node) in gathered]
        rings = [node for node in tensors if kind_of(node) == "shift"]
        shared_axes = {axis_of(node) for node in tensors if kind_of(node) != "shift"}
        kinds = {node: GRADIENTS for node in reductions if axis_of(node) in other_axes}
        kinds |= dict.fromkeys(exchanges, EXCHANGES)
        kinds |= {node: RING for node in rings if axis_of(node) in shared_axes}
        for node, kind in kinds.items():
            name_communicator(node, kind)
        program.module.recompile()
        counts = {"reductions": len(reductions), "exchanges": len(exchanges), "rings": len(rings), "apart": len(kinds)}
        axes = dict.fromkeys((axis_of(node), kind) for node, kind in kinds.items())
        notes = tuple(f"{axis}: {kind} have a communicator of their own" for axis, kind in axes)
        return program, ir.Report(counts, notes)


def name_communicator(node: fx.Node, kind: str) -> None:
    """Let a node use the communicator of its axis for one kind of values."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    index = names.index("axis" if "axis" in names else "group_name")
    node.args = (*node.args[:index], f"{node.args[index]}:{kind}", *node.args[index + 1 :])


def is_scalar(node: fx.Node) -> bool:
    """Return True if a collective carries one number."""
    return all(ir.example(operand).numel() == 1 for operand in node.all_input_nodes)


def gradient_reductions(program: ir.Program, collectives: list[fx.Node]) -> list[fx.Node]:
    """Return the collectives that reduce parameter gradients, for which only the update or the program's end waits."""
    tails = gradient_tails(program, kernels_of(program))
    return [
        node for node in collectives if kind_of(node) in REDUCTIONS and (node in tails or ir.phase(node) == "optimizer")
    ]
