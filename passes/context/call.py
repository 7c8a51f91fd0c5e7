"""The choice of a method for attention over a sequence that `cp` shards: bytes sent and held, and obstacles.

For one call, forward and backward, Q, O and KV are the bytes of a rank's own queries, results, keys and values, and
KV' those of its keys and values in fp32 or wider. A rank sends

    all_gather   2 (P-1) KV
    the others   2 (U-1)/U (Q + KV R + O)  +  (2 (N-1) KV + N KV') R      ring: U = 1, ulysses: U = P
                 R: copies of the key heads, if there are fewer than U
                 N: steps of P/U at which any rank sees anything; one step sends nothing

`auto` takes the cheapest method. Costs are bytes within a node: a byte between nodes counts as the bytes that travel
within a node in the same time (`Balance`). A ring sends while attention is computed, so only the bytes that this does
not hide count, and at least those of the last hop home. An all-gather computes pairs that a causal mask hides; this
counts as the bytes that could be sent in that time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from passes.context.kernels import wide_dtype
from passes.ir.machine import H100, Balance, spread

Method = Literal["auto", "ring", "all_gather", "ulysses", "hybrid"]
METHODS = ("ring", "all_gather", "ulysses", "hybrid")
# FLOPs that hide one byte within a node: 989 TFLOP/s over 450 GB/s. Attention is slower than this, which leaves room
# for costs that a count of bytes omits: latencies, kernels slowed by transfers (docs/internals/context.md).
HIDING_FLOPS = 2200
Pairs = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class AttentionCall:
    """One attention as a rank sees it: local shapes, dtype and mask.

    `pairs` are the (query rank, key rank) pairs in which a query sees a key; None if unknown or if all do. With
    `in_blocks`, keys do not lie where a causal ring or a masked ring expects them; attention by interval takes any
    order. `forms` are the methods that the operator supports. Its ranks are `stride` apart.
    """

    query: tuple[int, ...]  # b, h, s, e
    key: tuple[int, ...]  # b, g, s, e
    value: tuple[int, ...]  # b, g, s, f
    dtype: torch.dtype
    parts: int
    causal: bool = False
    zigzag: bool = False
    mask: Literal["none", "bool", "numbers"] = "none"
    mask_by_head: bool = False
    pairs: Pairs | None = None
    in_blocks: bool = False
    forms: tuple[str, ...] = METHODS
    stride: int = 1
    balance: Balance = H100

    # -- ranks that exchange heads (U), and steps of the ring across ------------------------------

    def exchange_size(self, method: str) -> int:
        """Return U, the number of neighbours that exchange heads for sequence."""
        return {"ring": 1, "ulysses": self.parts}.get(method) or min(self.divisors(), key=self.cost_across)

    def divisors(self) -> list[int]:
        """Return the values of U that a hybrid may take: those that divide the heads."""
        (_, h, _, _), (_, g, _, _) = self.query, self.key
        fits = (u for u in range(2, self.parts) if self.parts % u == 0)
        return [u for u in fits if h % u == 0 and (g % u == 0 or u % g == 0)]

    def steps(self, inner: int) -> tuple[int, ...]:
        """Return the steps of a ring across groups of `inner` at which any rank sees anything, step 0 always."""
        parts = self.parts // inner
        if self.pairs is None:
            return tuple(range(parts))
        apart = {(i // inner - j // inner) % parts for i, j in self.pairs}
        return tuple(sorted({0, *apart}))

    def copies(self, inner: int) -> int:
        """Return R, the copies of each key head that give each of `inner` ranks one."""
        return max(1, inner // self.key[1])

    # -- bytes ------------------------------------------------------------------------------------

    @property
    def keys(self) -> int:
        """The number of entries of keys and values."""
        (b, g, s, e), (*_, f) = self.key, self.value
        return b * g * s * (e + f)

    def exchanged_bytes(self, inner: int) -> int:
        """Return the bytes that a rank sends to exchange heads, forward and backward."""
        (b, h, s, e), (*_, f) = self.query, self.value
        return 2 * (inner - 1) * self.dtype.itemsize * (b * h * s * (e + f) + self.keys * self.copies(inner)) // inner

    def travelling_bytes(self, inner: int) -> int:
        """Return the bytes that a rank sends around the ring across groups, forward and backward."""
        n = len(self.steps(inner))
        bytes_per_entry = 2 * (n - 1) * self.dtype.itemsize + n * wide_dtype(self.dtype).itemsize
        return self.keys * self.copies(inner) * bytes_per_entry if n > 1 else 0

    def sent_bytes(self, method: str) -> int:
        """Return the bytes that a rank sends, forward and backward."""
        if method == "all_gather":
            return 2 * (self.parts - 1) * self.dtype.itemsize * self.keys
        inner = self.exchange_size(method)
        return self.exchanged_bytes(inner) + self.travelling_bytes(inner)

    def kept_bytes(self, method: str) -> int:
        """Return the bytes of keys and values that a rank holds at once in the forward."""
        local_bytes = self.keys * self.dtype.itemsize
        if method == "all_gather":
            return local_bytes * self.parts
        inner = self.exchange_size(method)
        return local_bytes * self.copies(inner) * min(2, len(self.steps(inner)))

    # -- the choice -------------------------------------------------------------------------------

    @property
    def hidden_bytes(self) -> int:
        """The bytes that could be sent while attention runs.

        The backward has 2.5 times the FLOPs of the forward (arXiv 2307.08691).
        """
        (b, h, s, e), (*_, f) = self.query, self.value
        flops = 3.5 * 2 * b * h * s * s * self.parts * (e + f)
        return int(flops * (0.5 if self.causal else 1.0) / HIDING_FLOPS)

    def near_bytes(self, kind: str, sent: int, ranks: int, apart: int = 1) -> int:
        """Return the bytes that take as long within a node as `sent` bytes among `ranks` ranks that are `apart`."""
        placement = spread(ranks, self.stride * apart, self.balance.gpus_per_node)
        return int(self.balance.near_bytes(kind, sent, placement))

    def cost_across(self, inner: int) -> int:
        """Return the bytes of exchanged heads and of a ring across groups that computation does not hide."""
        parts = self.parts // inner
        exchanged = self.near_bytes("all_to_all", self.exchanged_bytes(inner), inner)
        travelling = self.near_bytes("shift", self.travelling_bytes(inner), parts, inner)
        home = self.near_bytes("shift", self.keys * self.copies(inner) * wide_dtype(self.dtype).itemsize, parts, inner)
        return exchanged + min(travelling, max(home, travelling - self.hidden_bytes))

    def cost(self, method: str) -> int:
        """Return the cost that `auto` compares, in bytes within a node."""
        if method == "all_gather":
            gathered = self.near_bytes("all_gather", self.sent_bytes(method), self.parts)
            return gathered + (self.hidden_bytes if self.causal else 0)
        return self.cost_across(self.exchange_size(method))

    def obstacle(self, method: str) -> str:
        """Return the reason why this call cannot use a method, or an empty string."""
        (_, h, _, _), (_, g, _, _) = self.query, self.key
        if method not in self.forms:
            return "the operator does not support it"
        if method in ("ring", "hybrid") and self.mask == "numbers":
            return "a floating-point mask may need a gradient"
        if method in ("ring", "hybrid") and self.in_blocks:
            return "the sequence lies in blocks, and this attention is not by interval"
        if method in ("ring", "hybrid") and self.causal and not self.zigzag:
            return "the sequence is not laid out in a zigzag"
        if method == "ulysses" and (h % self.parts or (g % self.parts and self.parts % g)):
            return f"{h} heads ({g} of keys) do not divide evenly over {self.parts} ranks"
        if method == "hybrid" and not self.divisors():
            return f"{h} heads ({g} of keys) do not divide evenly over any part of {self.parts} ranks"
        if method in ("ulysses", "hybrid") and self.mask_by_head:
            return "the mask differs by head"
        return ""

    def choose(self, requested: str) -> tuple[str, str]:
        """Return the method and the reason for it; an empty method if the operator supports none."""
        obstacles = {method: self.obstacle(method) for method in METHODS}
        costs = {method: self.cost(method) for method, obstacle in obstacles.items() if not obstacle}
        if requested in costs:
            return requested, "as configured"
        if not costs:
            return "", "; ".join(f"{method} cannot: {obstacles[method]}" for method in self.forms)
        if requested != "auto" and "all_gather" in costs:
            return "all_gather", f"{requested} cannot: {obstacles[requested]}"
        best = min(costs, key=costs.__getitem__)
        cost_list = ", ".join(f"{m} {cost:,}" for m, cost in costs.items())
        instead = "" if requested == "auto" else f"{requested} cannot: {obstacles[requested]}; "
        return best, f"{instead}cheapest, in bytes: {cost_list}"
