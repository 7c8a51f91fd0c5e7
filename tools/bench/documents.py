"""Attention over packed documents on the CPU: time by visible pairs, compared with a mask in memory.

    python -m tools.bench.documents --tokens 65536 --counts 1,16,256
    python -m tools.bench.documents --tokens 8192 --counts 1,16,256 --mask      # and SDPA with a mask [tokens, tokens]

A sequence has documents of equal length; each token sees the earlier tokens of its document. Forward and backward,
fp32, CPU seconds of one thread. Rounds of the contenders alternate; the fastest counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from passes.context import interval_cpu  # noqa: F401, the kernel
from passes.program.attend import attend, attend_backward

Contender = Callable[[], object]


def main() -> None:
    """Print the table."""
    takes = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    takes.add_argument("--tokens", type=int, default=65536, help="length of the row")
    takes.add_argument("--counts", default="1,16,256", help="numbers of documents")
    takes.add_argument("--heads", type=int, default=2)
    takes.add_argument("--width", type=int, default=64, help="of a head")
    takes.add_argument("--rounds", type=int, default=3)
    takes.add_argument("--mask", action="store_true", help="also SDPA with a boolean mask in memory")
    given = takes.parse_args()
    torch.set_num_threads(1)
    counts = [int(count) for count in given.counts.split(",")]
    if any(given.tokens % count for count in counts):
        takes.error(f"--counts: {given.counts} do not all divide {given.tokens} tokens")
    tensors = [torch.randn(1, given.heads, given.tokens, given.width) for _ in range(4)]
    ways = {"by interval": by_interval} | ({"SDPA, mask in memory": masked} if given.mask else {})
    taken = timed({(name, count): way(count, *tensors) for name, way in ways.items() for count in counts}, given.rounds)
    Console().print(table(taken, given.tokens, given.heads))


def by_interval(count: int, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Contender:
    """Return the forward and backward of attention by bounds."""
    index = torch.arange(q.shape[2])[None]
    length = q.shape[2] // count
    told: tuple = (index // length * length, index + 1, None, [], q.shape[-1] ** -0.5, "")

    def run() -> object:
        out, lse = attend(q, k, v, *told)
        return attend_backward(gradient, q, k, v, out, lse, *told)

    return run


def masked(count: int, gradient: Tensor, *tensors: Tensor) -> Contender:
    """Return the forward and backward of PyTorch's attention with a boolean mask."""
    index = torch.arange(gradient.shape[2])
    ids = index // (gradient.shape[2] // count)
    mask = (ids[:, None] == ids) & (index[:, None] >= index)
    given = [x.clone().requires_grad_() for x in tensors]

    def run() -> object:
        q, k, v = given
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, mask), given, gradient)

    return run


def timed(contenders: dict[tuple[str, int], Contender], rounds: int) -> dict[tuple[str, int], float]:
    """Return the CPU seconds of each contender's fastest round; rounds alternate."""
    taken = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for key, run in contenders.items():
            began = time.process_time()
            run()
            taken[key] = min(taken[key], time.process_time() - began)
    return taken


def table(taken: dict[tuple[str, int], float], tokens: int, heads: int) -> Table:
    """Return a table of CPU milliseconds, and nanoseconds a visible pair."""
    found = Table(title=f"{tokens:,} tokens, {heads} heads, forward and backward")
    for column in ("", "documents", "pairs seen, a head", "CPU ms", "ns a pair", "of one document"):
        found.add_column(column, justify="right" if column else "left")
    for (name, count), seconds in taken.items():
        pairs = count * (tokens // count) * (tokens // count + 1) // 2
        each = {key: s / (key[1] * (tokens // key[1]) * (tokens // key[1] + 1) // 2) for key, s in taken.items()}
        first = next(each[key] for key in each if key[0] == name)
        cells = (f"{pairs:,}", f"{1e3 * seconds:,.1f}", f"{1e9 * each[name, count]:.2f}")
        found.add_row(name, str(count), *cells, f"{each[name, count] / first:.2f}")
    return found


if __name__ == "__main__":
    main()
