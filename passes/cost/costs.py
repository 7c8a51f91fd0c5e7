"""What each node of a program costs, for tools to list, sort and draw; sums are in `passes/cost/accounting.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from passes.cost.accounting import axis_of, count_flops, kind_of, kinds_of_storages, lifetimes, sent_bytes
from passes.program import ir
from passes.program.sweep import Sweep


@dataclass(frozen=True)
class Costs:
    """Rows in the graph's order, nodes by name; of one rank once the program is local.

    `collectives`: (node, kind, axis, bytes sent). `flops`: (node, FLOPs) where there are any. `storages`: (the node
    that makes it, the last node at which it is alive, bytes, what it holds); those of inputs are alive throughout.
    """

    collectives: tuple[tuple[str, str, str, int], ...]
    flops: tuple[tuple[str, int], ...]
    storages: tuple[tuple[str, str, int, str], ...]

    def as_json(self) -> str:
        """JSON with a line a row."""
        tables = (f'"{name}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for name, rows in vars(self).items())
        return "{\n" + ",\n".join(tables) + "\n}\n"


def costs(program: ir.Program, swept: Sweep) -> Costs:
    """The costs of every node."""
    collectives, flops = [], []
    for node in program.calls():
        kind, axis = kind_of(node), axis_of(node)
        if kind is not None and axis is not None:
            collectives.append((node.name, kind, axis, sent_bytes(node, swept, program.mesh)))
        if count := count_flops(node, swept):
            flops.append((node.name, count))
    return Costs(tuple(collectives), tuple(flops), storage_rows(program, swept))


def storage_rows(program: ir.Program, swept: Sweep) -> tuple[tuple[str, str, int, str], ...]:
    """Every storage on the device that takes memory, in the order in which they are made."""
    names = [node.name for node in program.graph.nodes]
    maker: dict[int, str] = {}
    for node in program.graph.nodes:
        for s in swept.storages(node) if node in swept.values else ():
            maker.setdefault(s, node.name)
    kind, lives = kinds_of_storages(program, swept), lifetimes(program, swept)
    order = sorted(lives, key=lambda s: (lives[s][0], s))
    return tuple((maker[s], names[lives[s][1]], b, kind[s]) for s in order if (b := swept.storage_bytes[s]))
