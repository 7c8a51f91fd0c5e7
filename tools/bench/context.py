"""Context parallelism in numbers: memory, bytes and work of each method, and what `auto` takes.

    python -m tools.bench.context

Keys and values, bytes sent and the choice are the compiler's own model (`passes/context`), which the tests compare
with the graphs; work is counted for real layouts, documents from the default corpus.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from compiler_trainer.config.schema import DataConfig
from compiler_trainer.data.datasets import build_datasets
from passes.context.balance import imbalance
from passes.context.context import METHODS, Call
from passes.program.mesh import Mesh

RANKS = (2, 4, 8, 16)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="length of the sequence")
    parser.add_argument("--rows", type=int, default=64, help="sequences of documents to average over")
    given = parser.parse_args()
    console = Console()
    console.print(methods(given.tokens))
    console.print(balance(given.tokens, given.rows))


def methods(tokens: int) -> Table:
    """Keys and values held and bytes sent by each method, for the attention of Llama 3 8B in bf16."""
    table = Table(title=f"one causal attention, 32 heads, 8 of keys, {tokens} tokens, bf16: MiB held, MiB sent")
    for column in ("cp", *METHODS, "auto"):
        table.add_column(column, justify="right")
    for ranks in RANKS:
        query, key = (1, 32, tokens // ranks, 128), (1, 8, tokens // ranks, 128)
        call = Call(query, key, key, torch.bfloat16, ranks, causal=True, folded=True)
        cells = []
        for method in METHODS:
            why = call.obstacle(method)
            cells.append("cannot" if why else f"{mib(call.kept_bytes(method))}, {mib(call.sent_bytes(method))}")
        table.add_row(str(ranks), *cells, call.choose("auto")[0])
    return table


def balance(tokens: int, rows: int) -> Table:
    """The most work of a rank over the mean: whole rows, and documents (mean and worst row)."""
    table = Table(title=f"most work of a rank over the mean, {tokens} tokens")
    for column in ("cp", "causal, head and tail", "causal, in runs", "documents, head and tail", "documents, in runs"):
        table.add_column(column, justify="right")
    corpus = build_datasets(DataConfig(), tokens, rows).train.next()
    for ranks in RANKS:
        runs = Mesh.of({"cp": ranks})
        folded = replace(runs, folded=frozenset({"cp"}))
        causal = torch.arange(tokens)[None] + 1
        cells = [f"{imbalance(causal, mesh):.4f}" for mesh in (folded, runs)]
        for mesh in (folded, runs):
            found = torch.tensor([imbalance(row[None] + 1, mesh) for row in corpus["positions"]])
            cells.append(f"{found.mean():.2f}, {found.max():.2f}")
        table.add_row(str(ranks), *cells)
    return table


def mib(count: int) -> str:
    """Bytes as MiB."""
    return f"{count / 2**20:.1f}"


if __name__ == "__main__":
    main()
