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
from passes.ops.attend import attend, attend_backward

Contender = Callable[[], object]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="length of the row")
    parser.add_argument("--counts", default="1,16,256", help="numbers of documents")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mask", action="store_true", help="also SDPA with a boolean mask in memory")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts = [int(count) for count in args.counts.split(",")]
    if any(args.tokens % count for count in counts):
        parser.error(f"--counts: {args.counts} do not all divide {args.tokens} tokens")
    tensors = [torch.randn(1, args.heads, args.tokens, args.width) for _ in range(4)]
    ways = {"by interval": by_interval} | ({"SDPA, mask in memory": masked} if args.mask else {})
    taken = timed({(name, count): way(count, *tensors) for name, way in ways.items() for count in counts}, args.rounds)
    Console().print(table(taken, args.tokens, args.heads))


def by_interval(count: int, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Contender:
    """Return the forward and backward of attention by bounds."""
    index = torch.arange(q.shape[2])[None]
    length = q.shape[2] // count
    bounds: tuple = (index // length * length, index + 1, None, [], q.shape[-1] ** -0.5, "")

    def run() -> object:
        out, lse = attend(q, k, v, *bounds)
        return attend_backward(gradient, q, k, v, out, lse, *bounds)

    return run


def masked(count: int, gradient: Tensor, *tensors: Tensor) -> Contender:
    """Return the forward and backward of PyTorch's attention with a boolean mask."""
    index = torch.arange(gradient.shape[2])
    ids = index // (gradient.shape[2] // count)
    mask = (ids[:, None] == ids) & (index[:, None] >= index)
    leaves = [x.clone().requires_grad_() for x in tensors]

    def run() -> object:
        q, k, v = leaves
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, mask), leaves, gradient)

    return run


def timed(contenders: dict[tuple[str, int], Contender], rounds: int) -> dict[tuple[str, int], float]:
    """Return the CPU seconds of each contender's fastest round; rounds alternate."""
    seconds_of = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for key, run in contenders.items():
            began = time.process_time()
            run()
            seconds_of[key] = min(seconds_of[key], time.process_time() - began)
    return seconds_of


def table(seconds_of: dict[tuple[str, int], float], tokens: int, heads: int) -> Table:
    """Return a table of CPU milliseconds, and nanoseconds a visible pair."""
    rows = Table(title=f"{tokens:,} tokens, {heads} heads, forward and backward")
    for column in ("", "documents", "pairs seen, a head", "CPU ms", "ns a pair", "of one document"):
        rows.add_column(column, justify="right" if column else "left")
    for (name, count), seconds in seconds_of.items():
        pairs = count * (tokens // count) * (tokens // count + 1) // 2
        per_pair = {
            key: s / (key[1] * (tokens // key[1]) * (tokens // key[1] + 1) // 2) for key, s in seconds_of.items()
        }
        first = next(per_pair[key] for key in per_pair if key[0] == name)
        cells = (f"{pairs:,}", f"{1e3 * seconds:,.1f}", f"{1e9 * per_pair[name, count]:.2f}")
        rows.add_row(name, str(count), *cells, f"{per_pair[name, count] / first:.2f}")
    return rows


if __name__ == "__main__":
    main()
