"""By which method an attention runs over a sequence that `cp` shards: what each of them sends, holds and needs.

For one call, forward and backward, with Q, O and KV the bytes of a rank's own queries, results, keys and values, and
KV' those in fp32 or wider, a rank sends

    all_gather   2 (P-1) KV
    the others   2 (U-1)/U (Q + KV R + O)  +  (2 (N-1) KV + N KV') R      ring: U = 1, ulysses: U = P
                 R: copies of the keys' heads, where there are fewer than U ranks
                 N: steps of P/U at which any rank sees anything; one step sends nothing

`auto` takes what is cheapest, in bytes inside a node: one that leaves it counts as those that travel there as long
(`Balance`). A ring's travel beside the computation, so only what that does not hide counts, and never less than the
last way home; an all-gather computes what a causal mask hides, which counts as the bytes that could have been sent
meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from passes.context.kernels import wide
from passes.program.machine import H100, Balance, spread

Method = Literal["auto", "ring", "all_gather", "ulysses", "hybrid"]
METHODS = ("ring", "all_gather", "ulysses", "hybrid")
# FLOPs that hide a byte in a node: 989 TFLOP/s over 450 GB/s. Attention is slower than this, which leaves room for
# the costs that a count of bytes lacks: latencies, kernels slowed by transfers (docs/internals/context.md).
HIDING_FLOPS = 2200
Pairs = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class AttentionCall:
    """One attention as a rank sees it: local shapes, its dtype, and what mask it has.

    `pairs` are the (rank of queries, rank of keys) that see anything, None if that is not known or all do. Keys
    `in_blocks` are not where a causal ring, or the mask of one, has them; attention by interval takes them anywhere.
    `forms` are the methods that the operator has a local form for. Its ranks are a `stride` apart.
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

    def exchanging(self, method: str) -> int:
        """U: how many neighbours exchange heads for sequence."""
        return {"ring": 1, "ulysses": self.parts}.get(method) or min(self.divisors(), key=self.cost_across)

    def divisors(self) -> list[int]:
        """What a hybrid may take for U: heads go evenly over it."""
        (_, h, _, _), (_, g, _, _) = self.query, self.key
        fits = (u for u in range(2, self.parts) if self.parts % u == 0)
        return [u for u in fits if h % u == 0 and (g % u == 0 or u % g == 0)]

    def steps(self, inner: int) -> tuple[int, ...]:
        """The steps of a ring across groups of `inner` at which any rank sees anything, the first included."""
        parts = self.parts // inner
        if self.pairs is None:
            return tuple(range(parts))
        apart = {(i // inner - j // inner) % parts for i, j in self.pairs}
        return tuple(sorted({0, *apart}))

    def copies(self, inner: int) -> int:
        """R: of each head of keys, so that each of `inner` ranks gets one."""
        return max(1, inner // self.key[1])

    # -- bytes ------------------------------------------------------------------------------------

    @property
    def keys(self) -> int:
        """Entries of keys and values."""
        (b, g, s, e), (*_, f) = self.key, self.value
        return b * g * s * (e + f)

    def exchanged_bytes(self, inner: int) -> int:
        """Sent for heads, forward and backward."""
        (b, h, s, e), (*_, f) = self.query, self.value
        return 2 * (inner - 1) * self.dtype.itemsize * (b * h * s * (e + f) + self.keys * self.copies(inner)) // inner

    def travelling_bytes(self, inner: int) -> int:
        """Sent around the ring across, forward and backward."""
        n = len(self.steps(inner))
        each = 2 * (n - 1) * self.dtype.itemsize + n * wide(self.dtype).itemsize
        return self.keys * self.copies(inner) * each if n > 1 else 0

    def sent_bytes(self, method: str) -> int:
        """Bytes that a rank sends, forward and backward."""
        if method == "all_gather":
            return 2 * (self.parts - 1) * self.dtype.itemsize * self.keys
        inner = self.exchanging(method)
        return self.exchanged_bytes(inner) + self.travelling_bytes(inner)

    def kept_bytes(self, method: str) -> int:
        """Bytes of keys and values that a rank holds at once in the forward."""
        own = self.keys * self.dtype.itemsize
        if method == "all_gather":
            return own * self.parts
        inner = self.exchanging(method)
        return own * self.copies(inner) * min(2, len(self.steps(inner)))

    # -- the choice -------------------------------------------------------------------------------

    @property
    def hidden_bytes(self) -> int:
        """What could be sent while attention is computed; its backward is 2.5 times the forward (arXiv 2307.08691)."""
        (b, h, s, e), (*_, f) = self.query, self.value
        flops = 3.5 * 2 * b * h * s * s * self.parts * (e + f)
        return int(flops * (0.5 if self.causal else 1.0) / HIDING_FLOPS)

    def near_bytes(self, kind: str, sent: int, ranks: int, apart: int = 1) -> int:
        """What would travel inside a node as long as bytes sent among so many of its ranks, every so many of them."""
        where = spread(ranks, self.stride * apart, self.balance.gpus_per_node)
        return int(self.balance.near_bytes(kind, sent, where))

    def cost_across(self, inner: int) -> int:
        """Bytes that nothing hides, of heads exchanged and a ring across."""
        parts = self.parts // inner
        exchanged = self.near_bytes("all_to_all", self.exchanged_bytes(inner), inner)
        travelling = self.near_bytes("shift", self.travelling_bytes(inner), parts, inner)
        home = self.near_bytes("shift", self.keys * self.copies(inner) * wide(self.dtype).itemsize, parts, inner)
        return exchanged + min(travelling, max(home, travelling - self.hidden_bytes))

    def cost(self, method: str) -> int:
        """What `auto` compares, in bytes inside a node."""
        if method == "all_gather":
            gathered = self.near_bytes("all_gather", self.sent_bytes(method), self.parts)
            return gathered + (self.hidden_bytes if self.causal else 0)
        return self.cost_across(self.exchanging(method))

    def obstacle(self, method: str) -> str:
        """Why a method cannot do it, or an empty string."""
        (_, h, _, _), (_, g, _, _) = self.query, self.key
        if method not in self.forms:
            return "the operator has no such form"
        if method in ("ring", "hybrid") and self.mask == "numbers":
            return "a mask of numbers may have a gradient"
        if method in ("ring", "hybrid") and self.in_blocks:
            return "the sequence is in blocks, and this is no attention by interval"
        if method in ("ring", "hybrid") and self.causal and not self.zigzag:
            return "the sequence does not lie in a zigzag"
        if method == "ulysses" and (h % self.parts or (g % self.parts and self.parts % g)):
            return f"{h} heads, {g} of keys, do not go evenly over {self.parts} ranks"
        if method == "hybrid" and not self.divisors():
            return f"{h} heads, {g} of keys, do not go evenly over any part of {self.parts} ranks"
        if method in ("ulysses", "hybrid") and self.mask_by_head:
            return "the mask differs by head"
        return ""

    def choose(self, asked: str) -> tuple[str, str]:
        """The method, and the reason; no method if the operator can do none."""
        obstacles = {method: self.obstacle(method) for method in METHODS}
        costs = {method: self.cost(method) for method, why in obstacles.items() if not why}
        if asked in costs:
            return asked, "asked for"
        if not costs:
            return "", "; ".join(f"{method} cannot: {obstacles[method]}" for method in self.forms)
        if asked != "auto" and "all_gather" in costs:
            return "all_gather", f"{asked} cannot: {obstacles[asked]}"
        best = min(costs, key=costs.__getitem__)
        listed = ", ".join(f"{m} {cost:,}" for m, cost in costs.items())
        instead = "" if asked == "auto" else f"{asked} cannot: {obstacles[asked]}; "
        return best, f"{instead}the cheapest, in bytes: {listed}"
