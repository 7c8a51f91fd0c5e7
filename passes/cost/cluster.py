"""A described cluster, and how long its links take for a collective.

Ranks fill nodes in order, so an axis whose inner axes have s ranks together meets gpus_per_node / s of its P ranks in a
node: it spans n nodes with m ranks in each. A ring sends every byte over the links inside a node, and of what a rank
sends (n - 1) / (P - 1) crosses between nodes, for all ranks of a node pull at once, each over its own adapter. What
takes longer counts, and every step of the ring adds the latency of a hop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from passes.program.mesh import Mesh

FLOPS_PER_BYTE = 2200  # computed while a byte is sent: an H100's 989 TFLOP/s in bf16 against NVLink's 450 GB/s each way


@dataclass(frozen=True)
class Link:
    """What one GPU sends in one direction, and the seconds that a hop adds."""

    bytes_per_s: float
    hop_s: float


@dataclass(frozen=True)
class Cluster:
    """Rates that one GPU reaches (not its peaks), and the links between GPUs; `kernel_s` is added to every kernel.

    All wait for the rank whose experts get most rows: `expert_load` times the mean.
    """

    gpus_per_node: int
    matmul_flops_per_s: Mapping[torch.dtype, float]
    attention_flops_per_s: float
    hbm_bytes_per_s: float
    kernel_s: float
    intra: Link
    inter: Link
    expert_load: float = 1.0


@dataclass(frozen=True)
class Reach:
    """Over how many nodes the ranks of an axis are spread, and how many of them are in each."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """Ranks of the axis."""
        return self.nodes * self.per_node


def reach(mesh: Mesh, axis: str, gpus_per_node: int) -> Reach:
    """Where the ranks of an axis are; a node that the inner axes do not fill evenly counts as holding fewer."""
    per_node = min(mesh[axis], max(1, gpus_per_node // mesh.stride(axis)))
    return Reach(-(-mesh[axis] // per_node), per_node)


def between_nodes(kind: str, sent_bytes: int, axis: Reach) -> float:
    """Bytes of what a rank sends that leave its node, the ranks of a node sharing the load."""
    if axis.nodes == 1:
        return 0.0
    if kind == "shift":
        return float(sent_bytes)  # the rank at the end of a node sends all of it
    peers = axis.ranks - axis.per_node if kind == "all_to_all" else axis.nodes - 1
    return sent_bytes * peers / (axis.ranks - 1)


def within_nodes(kind: str, sent_bytes: int, axis: Reach) -> float:
    """Bytes that a rank sends over the links inside its node."""
    if axis.per_node == 1:
        return 0.0
    return sent_bytes - between_nodes(kind, sent_bytes, axis) if kind == "all_to_all" else float(sent_bytes)


def latency(kind: str, axis: Reach, cluster: Cluster) -> float:
    """Seconds of the hops: of a ring, or a tree where a sum is quicker so; one hop where peers meet directly."""
    intra, inter = cluster.intra.hop_s, cluster.inter.hop_s
    if kind in ("all_to_all", "shift"):
        return inter if axis.nodes > 1 else intra
    ring = (axis.ranks - axis.nodes) * intra + (axis.nodes - 1) * inter
    if kind != "all_reduce":
        return ring
    tree = math.ceil(math.log2(axis.per_node)) * intra + math.ceil(math.log2(axis.nodes)) * inter
    return 2 * min(ring, tree)


def collective_seconds(kind: str, sent_bytes: int, axis: Reach, cluster: Cluster) -> float:
    """How long a collective takes in which every rank sends that much."""
    inside = within_nodes(kind, sent_bytes, axis) / cluster.intra.bytes_per_s
    outside = between_nodes(kind, sent_bytes, axis) / cluster.inter.bytes_per_s
    return max(inside, outside) + latency(kind, axis, cluster)
