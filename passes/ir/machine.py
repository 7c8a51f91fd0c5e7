"""The nodes that the ranks of an axis are on, and the computation that fits into the time of a transfer.

Ranks fill nodes in order, so an axis whose inner axes have s ranks together has gpus_per_node / s of its P ranks in
each node. Of a rank's bytes in a ring over n nodes, (n - 1) / (P - 1) cross between nodes, because the ranks of a node
share the load. In an all-to-all, the share of ranks on other nodes crosses. A shift crosses at the end of a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from passes.ir.mesh import Mesh


@dataclass(frozen=True)
class Reach:
    """The number of nodes that the ranks of an axis are spread over, and the number of ranks in each."""

    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        """The ranks of the axis."""
        return self.nodes * self.per_node


def reach(mesh: Mesh, axis: str, gpus_per_node: int) -> Reach:
    """Return the reach of an axis; a node that the inner axes do not fill evenly counts as holding fewer ranks."""
    return spread(mesh[axis], mesh.stride(axis), gpus_per_node)


def spread(ranks: int, stride: int, gpus_per_node: int) -> Reach:
    """Return the reach of `ranks` ranks, each a stride from the next."""
    per_node = min(ranks, max(1, gpus_per_node // stride))
    return Reach(-(-ranks // per_node), per_node)


def between_nodes(kind: str, sent_bytes: int, axis: Reach) -> float:
    """Return the bytes of a rank that leave its node; the ranks of a node share the load."""
    if axis.nodes == 1:
        return 0.0
    if kind == "shift":
        return float(sent_bytes)  # the last rank of a node sends everything to another node
    peers = axis.ranks - axis.per_node if kind == "all_to_all" else axis.nodes - 1
    return sent_bytes * peers / (axis.ranks - 1)


def within_nodes(kind: str, sent_bytes: int, axis: Reach) -> float:
    """Return the bytes that a rank sends over the links inside its node."""
    if axis.per_node == 1:
        return 0.0
    return sent_bytes - between_nodes(kind, sent_bytes, axis) if kind == "all_to_all" else float(sent_bytes)


@dataclass(frozen=True)
class Balance:
    """Rates of a GPU relative to each other: its FLOPs while a byte travels in its node, or moves in its memory.

    `flops_per_byte` are FLOPs of matmuls, `outside` the bytes that travel in a node while one travels between nodes.
    The default is an H100 in bf16: 989 TFLOP/s, NVLink's 450 GB/s each way, an adapter's 400 Gb/s; matmuls at 711
    TFLOP/s and memory at 3,015 GB/s, as in `cluster=h100`.
    """

    gpus_per_node: int = 8
    flops_per_byte: float = 2200
    outside: float = 9
    flops_per_moved_byte: float = 236

    def near_bytes(self, kind: str, sent_bytes: int, span: Reach) -> float:
        """Return the bytes inside a node that take as long as a collective in which every rank sends `sent_bytes`."""
        return max(within_nodes(kind, sent_bytes, span), self.outside * between_nodes(kind, sent_bytes, span))

    def flops(self, kind: str, sent_bytes: int, mesh: Mesh, axis: str) -> float:
        """Return the FLOPs that take as long as the collective."""
        return self.flops_per_byte * self.near_bytes(kind, sent_bytes, reach(mesh, axis, self.gpus_per_node))


H100 = Balance()
