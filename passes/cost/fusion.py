"""Which operators run as one kernel, and the bytes each kernel moves: a model of what Inductor makes of a program.

    mm -> to f32 -> square -> mean -> rsqrt -> mul -> to bf16 -> mm        three kernels: mm, a loop, mm

Views move nothing. A matrix product, an attention, a sort or a scatter is a kernel of its own. Everything else is a
loop, and loops of one phase with as many kernels before them run as one with the loops they read; so does a loop all
of whose readers are in one other. A reduction of more than a row, or of a row above `ROW` entries, is the last of its
kernel: what reads it has to wait for all of it. A kernel reads what was made outside of it once and writes what is
read outside of it; what stays inside never exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from passes.cost.accounting import count_flops, kind_of
from passes.program import ir
from passes.program.shift import arrive
from passes.program.sweep import Sweep, tensors
from passes.program.torch_private import OpOverload, c10d
from passes.rules import name_of

ROW = 65536
WAITS = frozenset({c10d.wait_tensor.default, arrive})
ALONE = frozenset({"embedding_dense_backward", "index_add", "index_put", "scatter", "scatter_add", "sort", "topk"})
LOOKUPS = frozenset({"embedding", "gather", "index", "index_select"})  # read of a table only the entries they yield

Kind = Literal["view", "loop", "alone", "collective", "wait"]


@dataclass(eq=False)
class Kernel:
    """Operators that run at once, in the program's order; `after` are the kernels whose results they need."""

    kind: Kind
    nodes: list[fx.Node]
    after: list[Kernel] = field(default_factory=list)
    moved_bytes: int = 0


def fuse(program: ir.Program, swept: Sweep, fused: bool = True) -> list[Kernel]:
    """The program's kernels, each after those it needs, otherwise as the last of their operators stand.

    Not `fused`, each operator is a kernel: what the eager backend runs.
    """
    found = Fusion(program, swept)
    if fused:
        found.join_levels()
        found.join_sole_readers()
    return in_order(found.kernels())


def in_order(kernels: Iterable[Kernel]) -> list[Kernel]:
    """The kernels in the order given, what a kernel needs moved before it."""
    done: dict[Kernel, None] = {}
    for kernel in kernels:
        stack = [kernel]
        while stack:
            if missing := [k for k in stack[-1].after if k not in done]:
                stack += missing
            else:
                done.setdefault(stack.pop())
    return list(done)


def kind_of_kernel(node: fx.Node, swept: Sweep) -> Kind:
    """What running an operator takes."""
    if node.target in WAITS:
        return "wait"
    if kind_of(node) is not None:
        return "collective"
    if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
        return "loop"
    yielded = swept.storages(node)
    if yielded <= set().union(*(swept.storages(n) for n in node.all_input_nodes)):
        return "view"
    return "alone" if name_of(node) in ALONE or count_flops(node, swept) else "loop"


def is_last(node: fx.Node, swept: Sweep) -> bool:
    """Whether what reads this loop cannot run in it: it reduces more than a row, or a long one."""
    operands = [v.layout.shape for n in node.all_input_nodes for v in tensors(swept.values[n])]
    if name_of(node) in LOOKUPS or not operands:
        return False
    largest = max(operands, key=math.prod)
    made = max((math.prod(v.layout.shape) for v in tensors(swept.values[node])), default=0)
    row = largest[-1] if largest else 1
    return made < math.prod(largest) and (row > ROW or made * row < math.prod(largest))


class Fusion:
    """Groups of operators; a group is known by one of its nodes, which `group` finds."""

    def __init__(self, program: ir.Program, swept: Sweep):
        self.swept = swept
        self.kinds = {node: kind_of_kernel(node, swept) for node in program.calls()}
        self.needs: dict[fx.Node, set[fx.Node]] = {}  # the operators, views looked through, that a node reads
        self.readers: dict[fx.Node, set[fx.Node]] = {node: set() for node in self.kinds}
        for node in (*self.kinds, program.graph.output_node()):
            self.needs[node] = set().union(*(self.origins(n) for n in node.all_input_nodes))
            if self.kinds.get(node) != "view":
                for source in self.needs[node]:
                    self.readers[source].add(node)
        self.last = {node for node, kind in self.kinds.items() if kind == "loop" and is_last(node, swept)}
        self.parent: dict[fx.Node, fx.Node] = {}

    def origins(self, node: fx.Node) -> set[fx.Node]:
        """The operators that made a value; none for an input."""
        if node not in self.kinds:
            return set()
        return self.needs[node] if self.kinds[node] == "view" else {node}

    def group(self, node: fx.Node) -> fx.Node:
        """The node by which the group of a node is known."""
        root = node
        while root in self.parent:
            root = self.parent[root]
        while node is not root:  # the next search from here is short
            self.parent[node], node = root, self.parent[node]
        return root

    def join(self, a: fx.Node, b: fx.Node) -> None:
        """Make two groups one."""
        if (a := self.group(a)) is not (b := self.group(b)):
            self.parent[a] = b

    def join_levels(self) -> None:
        """Join loops with the loops they read that have as many kernels before them: no path leads out and back."""
        level: dict[fx.Node, int] = {}
        for node, kind in self.kinds.items():
            level[node] = max((level[s] + self.ends(s) for s in self.needs[node]), default=0)
            for source in self.needs[node]:
                together = level[source] == level[node] and ir.phase(source) == ir.phase(node)
                if kind == "loop" and together and not self.ends(source):
                    self.join(source, node)

    def ends(self, node: fx.Node) -> bool:
        """Whether what reads the node is in another kernel."""
        return self.kinds[node] != "loop" or node in self.last

    def join_sole_readers(self) -> None:
        """Join groups of loops with the one group of loops that reads them: no path leads around."""
        members = self.members()
        for root in reversed(list(members)):
            own = members[root]
            if self.kinds[own[0]] != "loop" or any(node in self.last for node in own):
                continue
            outside = {self.group(reader) for node in own for reader in self.readers[node]} - {self.group(root)}
            if len(outside) == 1 and self.kinds.get(only := outside.pop()) == "loop":
                self.join(root, only)

    def members(self) -> dict[fx.Node, list[fx.Node]]:
        """The nodes of each group in order; groups in the order of their last nodes."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(self.kinds):
            if self.kinds[node] != "view":
                found.setdefault(self.group(node), []).append(node)
        return {root: own[::-1] for root, own in reversed(found.items())}

    def kernels(self) -> list[Kernel]:
        """The groups, with what they need and the bytes they move."""
        members = self.members()
        found = {root: Kernel(self.kinds[own[0]], own) for root, own in members.items()}
        for root, kernel in found.items():
            needed = {self.group(s): None for n in kernel.nodes for s in self.needs[n]}
            kernel.after = [found[s] for s in needed if s is not root]
            if kernel.kind in ("loop", "alone"):
                kernel.moved_bytes = self.read_bytes(kernel) + self.written_bytes(kernel)
        return list(found.values())

    def read_bytes(self, kernel: Kernel) -> int:
        """Bytes of values made outside, each once, and no more of a storage than it holds."""
        own = set().union(*(self.made(node) for node in kernel.nodes))
        seen: dict[int, dict[fx.Node, int]] = {}
        for node in kernel.nodes:
            reads = node.all_input_nodes[1:] if name_of(node) == "copy_" else node.all_input_nodes
            limit = sum(v.layout.size_bytes for v in tensors(self.swept.values[node]))
            for operand in reads:
                is_table = name_of(node) in LOOKUPS and operand is node.args[0]
                for value in tensors(self.swept.values[operand]):
                    if value.storage not in own:
                        size = min(value.layout.size_bytes, limit) if is_table else value.layout.size_bytes
                        seen.setdefault(value.storage, {})[operand] = size
        return sum(min(sum(sizes.values()), self.swept.storage_bytes[s]) for s, sizes in seen.items())

    def written_bytes(self, kernel: Kernel) -> int:
        """Bytes of results that are read outside, or that are written into what was there."""
        own, total = set(kernel.nodes), 0
        for node in kernel.nodes:
            made = self.made(node)
            kept = not self.readers[node] <= own
            for value in tensors(self.swept.values[node]):
                if kept or value.storage not in made:
                    total += value.layout.size_bytes
        return total

    def made(self, node: fx.Node) -> set[int]:
        """The storages that a node brings into being."""
        given = set().union(*(self.swept.storages(n) for n in node.all_input_nodes))
        return self.swept.storages(node) - given
