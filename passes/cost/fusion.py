"""The operators that run as one kernel, and the bytes each kernel moves: a model of Inductor's fusion.

    mm -> to f32 -> square -> mean -> rsqrt -> mul -> to bf16 -> mm        three kernels: mm, a loop, mm

Views move nothing. A matmul, an attention, a sort or a scatter is a kernel of its own. Everything else is a loop: an
operator of an elementwise or reduction kernel. Two adjacent loops of a phase fuse if they are at the same depth, which
is the number of kernels before them. A loop also fuses into its only reader. A reduction over more than a row, or over
a row above `ROW` entries, ends its kernel, because its readers need all of it. A kernel reads each outside value once
and writes the values that others read; values inside it are never in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from passes.cost.accounting import count_flops
from passes.ir import ir
from passes.ir.operators import is_mutable, kind_of, name_of
from passes.ops.shift import arrive
from passes.torch_private import c10d
from passes.trace.abstract_eval import Avals, tensors

ROW = 65536
WAITS = frozenset({c10d.wait_tensor.default, arrive})
ALONE = frozenset({"embedding_dense_backward", "index_add", "index_put", "scatter", "scatter_add", "sort", "topk"})
COPIES = frozenset({"_to_copy", "clone", "contiguous", "to"})
COSTLY = frozenset({"erf", "exp", "gelu", "log", "sigmoid", "silu", "softplus", "tanh"})  # too costly to compute twice
SMALL = 16  # a broadcast operand is at least this many times smaller than the output
LOOKUPS = frozenset(
    {"embedding", "gather", "index", "index_select"}
)  # read only the entries of a table that they return

Fused = Callable[[fx.Node], bool]  # whether an operator may run with others in a kernel
Kind = Literal["view", "copy", "loop", "alone", "collective", "wait"]  # a copy is computed inside its readers


@dataclass(eq=False)
class Kernel:
    """Operators of one kernel, in the program's order; `after` are the kernels whose results they need.

    The storages in `unwritten` hold values that only the kernel itself reads.
    """

    kind: Kind
    nodes: list[fx.Node]
    after: list[Kernel] = field(default_factory=list)
    moved_bytes: int = 0
    unwritten: frozenset[int] = frozenset()


def fuse(program: ir.Program, avals: Avals, fused: Fused = lambda node: True) -> list[Kernel]:
    """Return the program's kernels in the order of their last operators, each after the kernels that it needs.

    An operator that is not `fused` is a kernel of its own, as in the eager backend.
    """
    fusion = Fusion(program, avals, fused)
    fusion.join_levels()
    fusion.join_sole_readers()
    return in_order(fusion.kernels())


def in_order(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return the kernels in the given order, with the kernels that each needs moved before it."""
    done: dict[Kernel, None] = {}
    for kernel in kernels:
        stack = [kernel]
        while stack:
            if missing := [k for k in stack[-1].after if k not in done]:
                stack += missing
            else:
                done.setdefault(stack.pop())
    return list(done)


def kind_of_kernel(node: fx.Node, avals: Avals) -> Kind:
    """Return the kind of kernel that an operator needs."""
    if node.target in WAITS:
        return "wait"
    if kind_of(node) is not None:
        return "collective"
    if is_mutable(node):
        return "loop"
    outputs = avals.storages(node)
    if outputs <= set().union(*(avals.storages(n) for n in node.all_input_nodes)):
        return "view"
    return "alone" if name_of(node) in ALONE or count_flops(node, avals) else "loop"


def is_last(node: fx.Node, avals: Avals) -> bool:
    """Return True if no reader of this loop can run in its kernel: it reduces more than a row, or a long row."""
    operands = [v.layout.shape for n in node.all_input_nodes for v in tensors(avals.values[n])]
    if name_of(node) in LOOKUPS or not operands:
        return False
    largest = max(operands, key=math.prod)
    output_size = max((math.prod(v.layout.shape) for v in tensors(avals.values[node])), default=0)
    row = largest[-1] if largest else 1
    return output_size < math.prod(largest) and (row > ROW or output_size * row < math.prod(largest))


def is_cheap(node: fx.Node, avals: Avals) -> bool:
    """Return True if a value is computed elementwise from its first operand, and its other operands are small."""
    is_pointwise = torch.Tag.pointwise in node.target.tags and name_of(node) not in COSTLY  # type: ignore[union-attr]
    if not (is_pointwise or name_of(node) in COPIES) or not isinstance(node.args[0], fx.Node):
        return False
    output_shape = next(tensors(avals.values[node])).layout.shape
    first, *others = ([v.layout.shape for v in tensors(avals.values[n])] for n in node.all_input_nodes)
    others_are_small = all(SMALL * math.prod(shape) <= math.prod(output_shape) for shapes in others for shape in shapes)
    return others_are_small and [math.prod(shape) for shape in first] == [math.prod(output_shape)]


class Fusion:
    """Groups of operators; `group` finds the node that identifies a node's group."""

    def __init__(self, program: ir.Program, avals: Avals, fused: Fused):
        self.avals = avals
        self.kinds = {node: kind_of_kernel(node, avals) for node in program.calls()}
        self.single = {node for node in self.kinds if not fused(node)}
        self.find_copies()
        self.needs: dict[fx.Node, set[fx.Node]] = {}  # the operators that a node reads, through views
        self.readers: dict[fx.Node, set[fx.Node]] = {node: set() for node in self.kinds}
        for node in (*self.kinds, program.graph.output_node()):
            self.needs[node] = set().union(*(self.origins(n) for n in node.all_input_nodes))
            if self.kinds.get(node) not in ("view", "copy"):
                for source in self.needs[node]:
                    self.readers[source].add(node)
        self.last = {node for node, kind in self.kinds.items() if kind == "loop" and is_last(node, avals)}
        self.parent: dict[fx.Node, fx.Node] = {}

    def find_copies(self) -> None:
        """Mark the operators that are cheap and read only by loops of their phase, through views and other copies."""
        for node in reversed(self.kinds):
            is_loop = self.kinds[node] == "loop" and is_cheap(node, self.avals)
            if is_loop and node not in self.single and self.is_read_by_loops(node, ir.phase(node)):
                self.kinds[node] = "copy"

    def is_read_by_loops(self, node: fx.Node, phase: str) -> bool:
        """Return True if all readers of a value are loops of `phase` that change nothing in place."""

        def is_loop_of_phase(user: fx.Node) -> bool:
            if self.kinds.get(user) == "view":
                return self.is_read_by_loops(user, phase)
            is_loop = self.kinds.get(user) in ("loop", "copy") and ir.phase(user) == phase
            return is_loop and user not in self.single and not is_mutable(user)

        return all(map(is_loop_of_phase, node.users))

    def source_of(self, operand: fx.Node) -> fx.Node:
        """Return the value that a loop reads for an operand: the source of a copy instead of the copy."""
        while self.kinds.get(operand) in ("view", "copy"):
            if not any(self.kinds.get(n) == "copy" for n in self.view_chain(operand)):
                return operand
            operand = operand.all_input_nodes[0]
        return operand

    def view_chain(self, operand: fx.Node) -> list[fx.Node]:
        """Return a value and the values it is a view or copy of, in sequence."""
        chain = [operand]
        while self.kinds.get(chain[-1]) in ("view", "copy") and chain[-1].all_input_nodes:
            chain.append(chain[-1].all_input_nodes[0])
        return chain

    def origins(self, node: fx.Node) -> set[fx.Node]:
        """Return the operators that made a value; none for graph inputs."""
        if node not in self.kinds:
            return set()
        return self.needs[node] if self.kinds[node] in ("view", "copy") else {node}

    def group(self, node: fx.Node) -> fx.Node:
        """Return the node that identifies the group of a node."""
        root = node
        while root in self.parent:
            root = self.parent[root]
        while node is not root:  # the next search from here is short
            self.parent[node], node = root, self.parent[node]
        return root

    def join(self, a: fx.Node, b: fx.Node) -> None:
        """Merge two groups."""
        if (a := self.group(a)) is not (b := self.group(b)):
            self.parent[a] = b

    def join_levels(self) -> None:
        """Join loops with the loops they read at the same depth, which creates no cycle between kernels."""
        level: dict[fx.Node, int] = {}
        for node, kind in self.kinds.items():
            level[node] = max((level[s] + self.ends_kernel(s) for s in self.needs[node]), default=0)
            for source in self.needs[node]:
                together = level[source] == level[node] and ir.phase(source) == ir.phase(node)
                if kind == "loop" and together and not self.ends_kernel(source) and node not in self.single:
                    self.join(source, node)

    def ends_kernel(self, node: fx.Node) -> bool:
        """Return True if all readers of the node are in other kernels."""
        return self.kinds[node] != "loop" or node in self.last or node in self.single

    def join_sole_readers(self) -> None:
        """Join groups of loops with their only reading group of loops, which creates no cycle between kernels."""
        members = self.members()
        for group_id in reversed(list(members)):
            group_nodes = members[group_id]
            if any(self.ends_kernel(node) for node in group_nodes):
                continue
            reading_groups = {self.group(reader) for node in group_nodes for reader in self.readers[node]} - {
                self.group(group_id)
            }
            if (
                len(reading_groups) == 1
                and self.kinds.get(only_reader := reading_groups.pop()) == "loop"
                and only_reader not in self.single
            ):
                self.join(group_id, only_reader)

    def members(self) -> dict[fx.Node, list[fx.Node]]:
        """Return the nodes of each group in order; groups are in the order of their last nodes."""
        nodes_by_group: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(self.kinds):
            if self.kinds[node] not in ("view", "copy"):
                nodes_by_group.setdefault(self.group(node), []).append(node)
        return {root: nodes[::-1] for root, nodes in reversed(nodes_by_group.items())}

    def kernels(self) -> list[Kernel]:
        """Return the groups as kernels, with the kernels they need and the bytes they move."""
        members = self.members()
        kernel_of_group = {root: Kernel(self.kinds[nodes[0]], nodes) for root, nodes in members.items()}
        for root, kernel in kernel_of_group.items():
            needed_groups = {self.group(s): None for n in kernel.nodes for s in self.needs[n]}
            kernel.after = [kernel_of_group[s] for s in needed_groups if s is not root]
            if kernel.kind in ("loop", "alone"):
                kernel.moved_bytes = self.read_bytes(kernel) + self.written_bytes(kernel)
                kernel.unwritten = self.unwritten_storages(kernel)
        return list(kernel_of_group.values())

    def read_bytes(self, kernel: Kernel) -> int:
        """Return the bytes of values made outside the kernel, each counted once, at most the size of its storage."""
        created = set().union(*(self.created_storages(node) for node in kernel.nodes))
        bytes_by_storage: dict[int, dict[fx.Node, int]] = {}
        for node in kernel.nodes:
            reads = node.all_input_nodes[1:] if name_of(node) == "copy_" else node.all_input_nodes
            limit = sum(v.layout.size_bytes for v in tensors(self.avals.values[node]))
            for operand in reads:
                is_table = name_of(node) in LOOKUPS and operand is node.args[0]
                source = self.source_of(operand)
                for value in tensors(self.avals.values[source]):
                    if value.storage not in created:
                        size = min(value.layout.size_bytes, limit) if is_table else value.layout.size_bytes
                        bytes_by_storage.setdefault(value.storage, {})[source] = size
        return sum(min(sum(sizes.values()), self.avals.storage_bytes[s]) for s, sizes in bytes_by_storage.items())

    def written_bytes(self, kernel: Kernel) -> int:
        """Return the bytes of results that are read outside the kernel or written in place."""
        nodes, total = set(kernel.nodes), 0
        for node in kernel.nodes:
            created = self.created_storages(node)
            is_read_outside = not self.readers[node] <= nodes
            for value in tensors(self.avals.values[node]):
                if is_read_outside or value.storage not in created:
                    total += value.layout.size_bytes
        return total

    def unwritten_storages(self, kernel: Kernel) -> frozenset[int]:
        """Return the storages that exist only while the kernel runs: values that only it reads, and copies."""
        nodes = set(kernel.nodes)
        inner_nodes = [node for node in kernel.nodes if self.readers[node] and self.readers[node] <= nodes]
        storages = set[int]().union(*(self.created_storages(node) for node in inner_nodes))
        for operand in (n for node in kernel.nodes for n in node.all_input_nodes):
            storages.update(
                s for n in self.view_chain(operand) if self.kinds.get(n) == "copy" for s in self.created_storages(n)
            )
        return frozenset(storages)

    def created_storages(self, node: fx.Node) -> set[int]:
        """Return the storages that a node creates."""
        input_storages = set().union(*(self.avals.storages(n) for n in node.all_input_nodes))
        return self.avals.storages(node) - input_storages
