"""The cost of each node of a program, for tools to list, sort and draw; sums are in `passes/cost/accounting.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from passes.cost.accounting import Ledger


@dataclass(frozen=True)
class Costs:
    """Rows in the graph's order, nodes by name; of one rank if the program is local.

    `collectives`: (node, kind, axis, bytes sent). `flops`: (node, FLOPs) for nodes that have any. `storages`: (first
    node, last node where it is alive, bytes, kind); inputs are alive throughout.
    """

    collectives: tuple[tuple[str, str, str, int], ...]
    flops: tuple[tuple[str, int], ...]
    storages: tuple[tuple[str, str, int, str], ...]

    def as_json(self) -> str:
        """Return JSON with one line a row."""
        tables = (f'"{name}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for name, rows in vars(self).items())
        return "{\n" + ",\n".join(tables) + "\n}\n"


def costs(ledger: Ledger) -> Costs:
    """Return the costs of every node; a layer that stands for others has the costs of all of them."""
    return Costs(
        tuple((node.name, kind, axis, ledger.times(node) * n) for node, (kind, axis, n) in ledger.sends.items()),
        tuple((node.name, ledger.times(node) * n) for node, n in ledger.flops.items()),
        storage_rows(ledger),
    )


def storage_rows(ledger: Ledger) -> tuple[tuple[str, str, int, str], ...]:
    """Return every storage on the device that takes memory, in the order of their first nodes."""
    names, size = [node.name for node in ledger.program.graph.nodes], ledger.avals.storage_bytes
    order = sorted(ledger.all_lives, key=lambda life: (life.born, life.storage))
    lives = [(life, ledger.makers[life.storage].name) for life in order if size[life.storage]]
    return tuple(
        (maker if ledger.lives[s][0] == born else names[born], names[last], times * size[s], ledger.kinds[s])
        for (s, times, born, last), maker in lives
    )
