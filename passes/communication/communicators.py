"""Reductions of gradients, and exchanges, get a communicator of their own where their axis carries other values too.

    all_gather_into_tensor(w, 4, "fsdp")             all_gather_into_tensor(w, 4, "fsdp")
    reduce_scatter_tensor(g, "sum", 4, "fsdp")  ->   reduce_scatter_tensor(g, "sum", 4, "fsdp:gradients")
    all_to_all_single(x, [..], [..], "ep")           all_to_all_single(x, [..], [..], "ep:exchanges")

What one communicator sends comes in turn, what two send side by side: gathers of the next layer's parameters do not
queue behind gradients, which nobody waits for. Nor do rows of experts, or heads, queue behind those gathers, which are
in flight for a layer: of chunks of rows none would travel beside the products of another. A communicator costs memory,
so an axis that carries gradients alone (`dp_replicate`) keeps one, and scalars (losses, norms) never ask for one. Every
rank runs this program, so the order in each communicator, and between them, is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from passes.communication.layer_starts import gradient_tails, kernels_of
from passes.program import ir
from passes.program.operators import EXCHANGES, GRADIENTS, axis_of, kind_of
from passes.program.stages import Stage
from passes.program.weights import weight_nodes

REDUCTIONS = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Communicators(ir.Pass):
    """Name the communicator of each reduction of gradients, and of each exchange."""

    name = "communicators"
    takes = (Stage.EXPLICIT,)
    keeps = True

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        if not any(map(kind_of, program.calls())):
            return program, ir.Report({"reductions": 0, "exchanges": 0, "apart": 0})
        program = program.copy()
        tensors = [node for node in program.calls() if kind_of(node) and not is_scalar(node)]
        reductions = gradient_reductions(program, tensors)
        beside = {axis_of(node) for node in tensors if node not in reductions}
        weights = set(weight_nodes(program))
        gathered = {axis_of(node) for node in tensors if kind_of(node) == "all_gather" and node in weights}
        exchanges = [node for node in tensors if kind_of(node) == "all_to_all" and axis_of(node) in gathered]
        apart = {node: GRADIENTS for node in reductions if axis_of(node) in beside}
        apart |= dict.fromkeys(exchanges, EXCHANGES)
        for node, whose in apart.items():
            *others, axis = node.args
            node.args = (*others, f"{axis}:{whose}")
        program.module.recompile()
        counts = {"reductions": len(reductions), "exchanges": len(exchanges), "apart": len(apart)}
        axes = dict.fromkeys((axis_of(node), whose) for node, whose in apart.items())
        notes = tuple(f"{axis}: {whose} have a communicator of their own" for axis, whose in axes)
        return program, ir.Report(counts, notes)


def is_scalar(node: fx.Node) -> bool:
    """Whether a collective carries one number."""
    return all(ir.example(operand).numel() == 1 for operand in node.all_input_nodes)


def gradient_reductions(program: ir.Program, collectives: list[fx.Node]) -> list[fx.Node]:
    """The collectives that reduce gradients of parameters, which only the update, or the end, waits for."""
    tails = gradient_tails(program, kernels_of(program))
    return [
        node
        for node in collectives
        if kind_of(node) in REDUCTIONS and (node in tails or ir.phase(node) == "optimizer")
    ]
