"""Refuse look-ups in tables that are too short for a batch, before anything runs.

    tokens below 32,000, embedding of 16,000 rows              refused: give the model as many
    positions up to 4,095, learned positions of 2,048 rows     refused: shorter sequences, or more positions
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import fx

from compiler_trainer.config.errors import UserError
from passes.ir import ir
from passes.ir.slices import backward_slice, cone_of

LOOK_UPS = (torch.ops.aten.embedding.default, torch.ops.aten.index.Tensor)
POSITIONS = "positions"  # the batch entry with each token's position in its document


def check_look_ups(program: ir.Program, below: Mapping[str, int]) -> None:
    """Raise UserError if a batch entry or a position is looked up in a table that is too short for it."""
    placeholders = list(zip(program.inputs, program.placeholders(), strict=True))
    bounds = {node: (i.name, below[i.name]) for i, node in placeholders if i.kind == "batch" and i.name in below}
    tables = {node for i, node in placeholders if i.kind in ir.MODEL_STATE}
    for node, table, entries in find_look_ups(program, tables):
        rows = ir.example(table).shape[0]
        name, bound = bounds.get(entries, ("", 0))
        if name and name != POSITIONS and bound > rows:
            table_text = f"{ir.source(node)} looks up in {rows} rows"
            raise UserError(
                f"batch[{name!r}]", f"has numbers below {bound}, which {table_text}; give the model as many"
            )
        if (last := last_position(program, entries, below)) >= rows:
            length = ir.example(entries).shape[-1]
            fix = f"set train.seq_len={max(2, length - (last + 1 - rows))} or less, or give the model as many"
            problem = f"rows of {length} tokens reach position {last}, but {ir.source(node)} looks up in {rows}"
            raise UserError("train.seq_len", f"{problem}; {fix}")


def find_look_ups(program: ir.Program, tables: Set[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node, fx.Node]]:
    """Yield (node, table, indices) of each look-up in a stored table."""
    for node in program.calls():
        if node.target in LOOK_UPS and node.args[0] in tables:
            table, entries = node.args[:2]
            numbers: Any = entries[0] if isinstance(entries, list | tuple) else entries  # aten.index takes one per dim
            if isinstance(numbers, fx.Node):
                yield node, table, numbers  # type: ignore[misc]


def last_position(program: ir.Program, entries: fx.Node, below: Mapping[str, int]) -> int:
    """Return the largest index computed from positions and constants alone; -1 if it has other inputs."""
    ends = {node: i for node, i in zip(program.placeholders(), program.inputs)}
    inputs = [i for node, i in ends.items() if node in cone_of(entries, ends.keys())]
    values = {i.name: i.value for i in inputs if i.value is not None}
    if any(i.name == POSITIONS and i.kind == "batch" and POSITIONS in below for i in inputs):
        node = next(n for n, i in ends.items() if i.name == POSITIONS)
        shape, device = ir.example(node).shape, ir.example(node).device
        values[POSITIONS] = torch.arange(below[POSITIONS], device=device)[-shape[-1] :].expand(shape)
    if ir.example(entries).is_floating_point() or any(i.name not in values for i in inputs):
        return -1
    slice_program = backward_slice(program, ends, [entries])
    return int(slice_program.module(*(values[i.name] for i in slice_program.inputs))[0].max())
