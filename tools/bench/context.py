"""Context parallelism in numbers: memory, bytes and work of each method, and the choice of `auto`.

    python -m tools.bench.context

Keys and values, bytes sent and the choice come from the compiler's own model (`passes/context`), which the tests
compare with the graphs. Work is counted for real layouts, with documents from the default corpus.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from statistics import mean

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compiler_trainer.config.schema import ContextConfig, DataConfig
from compiler_trainer.data.datasets import build_datasets
from passes.context.balance import assign_blocks, imbalance, ranks_that_meet, work_of_blocks
from passes.context.call import METHODS, AttentionCall, Pairs
from passes.ir.mesh import Mesh
from passes.ir.order import PLAIN, ZIGZAG, Order

RANKS, BLOCK = (2, 4, 8, 16), ContextConfig.block


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="length of the sequence")
    parser.add_argument("--rows", type=int, default=64, help="sequences of documents to average over")
    args = parser.parse_args()
    console = Console()
    console.print(methods(args.tokens))
    corpus = build_datasets(DataConfig(), args.tokens, args.rows).train.next()["positions"]
    console.print(balance(args.tokens, corpus))
    console.print(rings(args.tokens, corpus))


def methods(tokens: int) -> Table:
    """Return a table of keys and values held and bytes sent by each method, for the attention of Llama 3 8B in bf16."""
    table = Table(title=f"one causal attention, 32 heads, 8 of keys, {tokens} tokens, bf16: MiB held, MiB sent")
    for column in ("cp", *METHODS, "auto"):
        table.add_column(column, justify="right")
    for ranks in RANKS:
        query, key = (1, 32, tokens // ranks, 128), (1, 8, tokens // ranks, 128)
        call = AttentionCall(query, key, key, torch.bfloat16, ranks, causal=True, zigzag=True)
        cells = []
        for method in METHODS:
            obstacle = call.obstacle(method)
            cells.append("cannot" if obstacle else f"{mib(call.kept_bytes(method))}, {mib(call.sent_bytes(method))}")
        table.add_row(str(ranks), *cells, call.choose("auto")[0])
    return table


def balance(tokens: int, corpus: Tensor) -> Table:
    """Return a table of the largest work of a rank over the mean, by layout.

    It is for causal sequences, and for documents (mean and worst sequence).
    """
    table = Table(title=f"most work of a rank over the mean, {tokens} tokens: causal; documents, mean and worst row")
    for column in ("cp", *(f"{kind}, {layout}" for kind in ("causal", "documents") for layout in LAYOUTS)):
        table.add_column(column, justify="right")
    causal = torch.arange(tokens)[None] + 1
    for ranks in RANKS:
        mesh = Mesh.of({"cp": ranks})
        cells = [f"{imbalance([causal], mesh, layout(causal, ranks)):.4f}" for layout in LAYOUTS.values()]
        for sequence_layout in LAYOUTS.values():
            imbalances = [imbalance([row], mesh, sequence_layout(row, ranks)) for row in (corpus + 1)[:, None]]
            cells.append(f"{mean(imbalances):.3f}, {max(imbalances):.3f}")
        table.add_row(str(ranks), *cells)
    return table


def rings(tokens: int, corpus: Tensor) -> Table:
    """Return a table of the bytes that a rank sends around a ring, forward and backward, as a share of all steps."""
    rows = {f"of {n}": torch.arange(tokens)[None] % n for n in (500, 1500)} | {"of the corpus": corpus}
    table = Table(title=f"sent by a ring, {tokens} tokens, documents within a row: MiB, of MiB at every step")
    for column in ("cp", *(f"{name}, {layout}" for name in rows for layout in ("none", "head_tail"))):
        table.add_column(column, justify="right")
    for ranks in (4, 8):
        query, key = (1, 32, tokens // ranks, 128), (1, 8, tokens // ranks, 128)
        call, cells = AttentionCall(query, key, key, torch.bfloat16, ranks), []
        for positions in rows.values():
            for layout in ("none", "head_tail"):
                needed = [steps_of(row, ranks, LAYOUTS[layout](row, ranks)) for row in positions[:, None]]
                sent = mean(replace(call, pairs=pairs).sent_bytes("ring") for pairs in needed)
                cells.append(f"{sent / 2**20:.1f} of {mib(call.sent_bytes('ring'))}")
        table.add_row(str(ranks), *cells)
    return table


def steps_of(positions: Tensor, ranks: int, order: Order) -> Pairs:
    """Return the pairs of ranks whose tokens attend to each other in a sequence of documents."""
    last = torch.arange(1, positions.shape[-1] + 1)[None]
    meet = ranks_that_meet(last - 1 - positions, last, Mesh.of({"cp": ranks}), order)
    return frozenset((i, j) for i, j in meet.nonzero().tolist())


def in_blocks(seen: Tensor, ranks: int) -> Order:
    """Return the order in which blocks of a sequence are shared out by the pairs that their queries see."""
    count = 2 * ranks * -(-seen.shape[-1] // (2 * ranks * BLOCK))
    return Order(table=assign_blocks(work_of_blocks([seen], count), ranks))


LAYOUTS: dict[str, Callable[[Tensor, int], Order]] = {
    "none": lambda seen, ranks: PLAIN,
    "head_tail": lambda seen, ranks: ZIGZAG,
    "blocks": in_blocks,
}


def mib(count: int) -> str:
    """Return bytes as MiB."""
    return f"{count / 2**20:.1f}"


if __name__ == "__main__":
    main()
