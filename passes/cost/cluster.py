"""A described cluster, and the time of a collective on its links.

Ranks fill nodes in order. If the inner axes of an axis have s ranks together, gpus_per_node / s of its P ranks are in
one node: the axis spans n nodes with m ranks in each. Times inside a node are measured by kind, ranks and bytes, with
all ranks of the node at work. Times between nodes follow NCCL's own model (`ncclTopoTuneModel`, nccl 2.29): a ring
sends every byte over the links inside a node, and (n - 1) / (P - 1) of a rank's bytes go between nodes, because all
ranks of a node send at once, each over its own adapter. The slower of the two counts. Each step adds the latency of a
hop, for the protocol that is fastest at the size. A sum of few bytes uses a tree instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from passes.cost.rates import Curve, Rates
from passes.ir.machine import Reach, between_nodes, within_nodes

TREE_SHARE = 0.92  # of a ring's bandwidth, in NCCL's model


@dataclass(frozen=True)
class Protocol:
    """A protocol of NCCL: seconds before the first byte and of a hop inside and between nodes, share of bandwidth."""

    base_s: float = 0.0
    intra_s: float = 0.0
    inter_s: float = 0.0
    share: float = 1.0


@dataclass(frozen=True)
class Links:
    """The bandwidth of one GPU in one direction, inside its node and out of it, and the protocols to choose from.

    `measured`: for (kind, ranks in a node), seconds by the bytes that a rank sends.
    """

    intra_bytes_per_s: float
    inter_bytes_per_s: float
    protocols: tuple[Protocol, ...] = (Protocol(),)
    measured: Mapping[tuple[str, int], Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class Beside:
    """The shares of speed that a kernel keeps during a collective, and a collective during a kernel."""

    computing: float = 1.0  # a matmul or an attention
    moving: float = 1.0  # a kernel limited by memory
    sending: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """The rates of one GPU, the links between GPUs, and the slowdown when both are in use.

    All ranks wait for the rank whose experts get most tokens: `expert_load` times the mean.
    """

    gpus_per_node: int
    rates: Rates
    links: Links
    beside: Beside = Beside()
    expert_load: float = 1.0


def collective_seconds(kind: str, sent_bytes: int, axis: Reach, links: Links) -> float:
    """Return the time of a collective in which every rank sends `sent_bytes`."""
    ranks = sorted(p for measured_kind, p in links.measured if measured_kind == kind)
    if axis.nodes == 1 and ranks:
        return measured_seconds(kind, sent_bytes, axis.ranks, ranks, links)
    intra_s = within_nodes(kind, sent_bytes, axis) / links.intra_bytes_per_s
    inter_s = between_nodes(kind, sent_bytes, axis) / links.inter_bytes_per_s
    moving = max(intra_s, inter_s)
    times = [latency(kind, axis, p) + moving / p.share for p in links.protocols]
    if kind == "all_reduce":
        times += [tree_latency(axis, p) + moving / (TREE_SHARE * p.share) for p in links.protocols]
    return min(times)


def measured_seconds(kind: str, sent_bytes: int, count: int, measured_ranks: list[int], links: Links) -> float:
    """Return the seconds among `count` ranks of a node, interpolated between the nearest measured numbers of ranks."""
    below = max((p for p in measured_ranks if p <= count), default=measured_ranks[0])
    above = min((p for p in measured_ranks if p >= count), default=measured_ranks[-1])
    first, last = (links.measured[kind, p].seconds(sent_bytes) for p in (below, above))
    return first if below == above else Curve(((below, first), (above, last))).at(count)


def latency(kind: str, axis: Reach, protocol: Protocol) -> float:
    """Return the seconds until the first byte arrives: the hops of a ring, or one hop if peers communicate directly."""
    if kind in ("all_to_all", "shift"):
        return protocol.base_s + (protocol.inter_s if axis.nodes > 1 else protocol.intra_s)
    times = 2 if kind == "all_reduce" else 1
    hops = (axis.ranks - axis.nodes) * protocol.intra_s + (axis.nodes - 1) * protocol.inter_s
    return protocol.base_s + times * hops


def tree_latency(axis: Reach, protocol: Protocol) -> float:
    """Return the seconds up a tree of nodes, the ranks of each in a chain, and down again."""
    hops = (axis.per_node - 1) * protocol.intra_s + math.ceil(math.log2(axis.nodes)) * protocol.inter_s
    return protocol.base_s + 2 * hops
