"""The layout of the sequence over the ranks of `cp`.

    none         one run for each rank
    head_tail    a chunk from the front and one from the back: balanced under a causal mask
    blocks       head and tail in blocks; for each batch, ranks exchange blocks until the work that its documents
                 cause is balanced
    auto         blocks if documents decide what attention sees and a rank has four blocks or more; head_tail if
                 attention is causal or by interval; otherwise none

Attention by interval takes keys in any order. Other attention over a sequence in blocks gathers keys or heads, so
`auto` does not choose blocks for a program with such attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, fx

from passes.context.balance import assign_blocks
from passes.context.operators import OPERATORS
from passes.ir import ir
from passes.ir.mesh import SEQUENCE_AXIS as AXIS
from passes.ir.order import PLAIN, ZIGZAG, Order
from passes.ir.slices import backward_slice, cone_of
from passes.ir.stages import Stage

OPTIONS = "passes.context"
Layout = Literal["auto", "head_tail", "blocks", "none"]


@dataclass(frozen=True)
class SequenceLayout(ir.Pass):
    """Choose the layout of the sequence; a `block` has at most that many tokens."""

    layout: Layout = "auto"
    block: int = 128
    name = "sequence_layout"
    takes = (Stage.NORMALIZED,)

    def rewrite(self, program: ir.Program, ctx: ir.Context) -> tuple[ir.Program, ir.Report]:
        mesh, length = program.mesh, length_of(program)
        if AXIS not in mesh.axes or not length:
            return program, ir.Report({"blocks": 0})
        program = replace(program, bounds=bounds_of(program))
        blocks = 2 * -(-length // (2 * mesh[AXIS] * self.block))
        layout, reason = choose(program, blocks) if self.layout == "auto" else (self.layout, "as configured")
        text = f"{layout}, {reason}"
        order = ZIGZAG if layout == "head_tail" else PLAIN
        if layout == "blocks":
            order = Order(table=assign_blocks(torch.ones(blocks * mesh[AXIS]), mesh[AXIS]))  # equal work: head and tail
            text += f"; blocks of {-(-length // (blocks * mesh[AXIS]))} tokens"
        inputs = tuple(replace(i, spec=i.spec.ordered(order)) if i.kind == "batch" else i for i in program.inputs)
        pieces = {"blocks": blocks, "head_tail": 2}.get(layout, 1)
        effect = ir.Effect(f"{OPTIONS}.load_balance", pieces, "pieces of the sequence on each rank", detail=text)
        counts = {"blocks": blocks if layout == "blocks" else 0}
        return replace(program, inputs=inputs), ir.Report(counts, effects=(effect,))


def choose(program: ir.Program, blocks: int) -> tuple[Layout, str]:
    """Return the layout that `auto` chooses if a rank would have that many `blocks`, and the reason."""
    calls = {node: OPERATORS[node.target] for node in program.calls() if node.target in OPERATORS}  # type: ignore[index]
    plain = [node for node, record in calls.items() if record.bounds is None]
    if len(plain) == len(calls) and not any(calls[node].causal(node) for node in plain):
        return "none", "all queries have the same work"
    if program.bounds is None:
        return "head_tail", "attention sees the same keys in all batches"
    if plain:
        return "head_tail", f"%{plain[0].name} ({ir.source(plain[0])}) is not attention by interval"
    if blocks < 4:
        return "head_tail", "the sequence is too short for blocks"
    return "blocks", "documents decide what attention sees"


def length_of(program: ir.Program) -> int:
    """Return the tokens of the longest sequence of the batch, 0 if it has none.

    If a batch has entries of one number for each token, those with more dims are others, such as images.
    """
    shapes = [item.spec.shape for item in program.inputs if item.kind == "batch"]
    of_tokens = [shape for shape in shapes if len(shape) == 2]
    return max((shape[1] for shape in of_tokens or shapes if len(shape) > 1), default=0)


def bounds_of(program: ir.Program) -> ir.Program | None:
    """Return a program that computes the bounds of all attention by interval from a batch, on the host.

    Return None if no bounds depend on a batch.
    """
    inputs = dict(zip(program.placeholders(), program.inputs))
    ends = {node: i for node, i in inputs.items() if i.kind in ("batch", "constant")}
    pairs = dict.fromkeys(filter(None, map(bounds_at, program.calls())))
    bounds = [bound for pair in pairs for bound in pair]
    read = set[fx.Node]().union(*(cone_of(node, ends.keys()) for node in bounds)) & inputs.keys()
    if not read <= ends.keys() or not any(inputs[node].kind == "batch" for node in read):
        return None
    bounds_program = backward_slice(program, ends, bounds)
    for node in bounds_program.calls():
        if "device" in node.kwargs:
            node.update_kwarg("device", torch.device("cpu"))
    return bounds_program


def bounds_at(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the first and last key that each query of a call of attention by interval sees; None for another node."""
    record = OPERATORS.get(node.target)  # type: ignore[arg-type]
    return record.bounds(node) if record is not None and record.bounds is not None else None


def bounds_in(bounds: ir.Program, batch: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the first and last key that each query of a batch sees, i64[B or 1, T], for each attention's bounds."""
    values = [batch[i.name].cpu() if i.value is None else i.value.cpu() for i in bounds.inputs]
    with torch.no_grad():
        results = bounds.module(*values)
    return list(zip(results[::2], results[1::2]))
