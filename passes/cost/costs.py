"""What each node of a program costs, for tools to list, sort and draw; sums are in `passes/cost/accounting.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass

from passes.cost.accounting import Ledger


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


def costs(ledger: Ledger) -> Costs:
    """The costs of every node."""
    collectives = tuple((node.name, *sent) for node, sent in ledger.sends.items())
    return Costs(collectives, tuple((node.name, n) for node, n in ledger.flops.items()), storage_rows(ledger))


def storage_rows(ledger: Ledger) -> tuple[tuple[str, str, int, str], ...]:
    """Every storage on the device that takes memory, in the order in which they are made."""
    names, swept = [node.name for node in ledger.program.graph.nodes], ledger.swept
    maker: dict[int, str] = {}
    for node in swept.values:
        for s in swept.storages(node):
            maker.setdefault(s, node.name)
    kind, lives = ledger.kinds, ledger.lives
    order = sorted(lives, key=lambda s: (lives[s][0], s))
    return tuple((maker[s], names[lives[s][1]], b, kind[s]) for s in order if (b := swept.storage_bytes[s]))
