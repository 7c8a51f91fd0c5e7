"""Where the ranks of an axis are, and what a GPU computes while bytes travel between them.

Ranks fill nodes in order, so an axis whose inner axes have s ranks together meets gpus_per_node / s of its P ranks in a
node. Of what a rank sends in a ring over n nodes (n - 1) / (P - 1) crosses between nodes, for the ranks of a node share
the load; rows for all others cross as often as their ranks are elsewhere; a shift crosses at the end of a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from passes.program.mesh import Mesh


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
    return spread(mesh[axis], mesh.stride(axis), gpus_per_node)


def spread(ranks: int, stride: int, gpus_per_node: int) -> Reach:
    """Where so many ranks are, each a stride from the next."""
    per_node = min(ranks, max(1, gpus_per_node // stride))
    return Reach(-(-ranks // per_node), per_node)


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


@dataclass(frozen=True)
class Balance:
    """Rates of a GPU relative to each other: what it computes while a byte travels in its node, or moves in its memory.

    `flops_per_byte` are FLOPs of products, `outside` the bytes that travel in a node while one travels between nodes.
    By default an H100 in bf16: 989 TFLOP/s, NVLink's 450 GB/s each way, an adapter's 400 Gb/s; products at 711 TFLOP/s
    and memory at 3,015 GB/s, as `cluster=h100` has them.
    """

    gpus_per_node: int = 8
    flops_per_byte: float = 2200
    outside: float = 9
    flops_per_moved_byte: float = 236

    def near_bytes(self, kind: str, sent_bytes: int, where: Reach) -> float:
        """Bytes that would travel inside a node as long as a collective in which every rank sends that much."""
        return max(within_nodes(kind, sent_bytes, where), self.outside * between_nodes(kind, sent_bytes, where))

    def flops(self, kind: str, sent_bytes: int, mesh: Mesh, axis: str) -> float:
        """FLOPs that take as long as that."""
        return self.flops_per_byte * self.near_bytes(kind, sent_bytes, reach(mesh, axis, self.gpus_per_node))


H100 = Balance()
