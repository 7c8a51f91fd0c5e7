"""Which operators run as one kernel, and the bytes each kernel moves: a model of what Inductor makes of a program.

    mm -> to f32 -> square -> mean -> rsqrt -> mul -> to bf16 -> mm        three kernels: mm, a loop, mm

Views move nothing. A matrix product, an attention, a sort or a scatter is a kernel of its own. Everything else is a
loop. Two adjacent loops of a phase fuse if they are at the same depth, which is the number of kernels before them; a
loop also fuses into the loop that alone reads it. A reduction of more than a row, or of a row above `ROW` entries, is
the last of its kernel: what reads it has to wait for all of it. A kernel reads each outside value once and writes the
values that others read; values inside it are never in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from passes.cost.accounting import count_flops
from passes.program import ir
from passes.program.abstract_eval import Avals, tensors
from passes.program.operators import is_mutable, kind_of, name_of
from passes.program.shift import arrive
from passes.program.torch_private import c10d

ROW = 65536
WAITS = frozenset({c10d.wait_tensor.default, arrive})
ALONE = frozenset({"embedding_dense_backward", "index_add", "index_put", "scatter", "scatter_add", "sort", "topk"})
COPIES = frozenset({"_to_copy", "clone", "contiguous", "to"})
COSTLY = frozenset({"erf", "exp", "gelu", "log", "sigmoid", "silu", "softplus", "tanh"})  # are not computed twice
SMALL = 16  # a broadcast operand is so many times smaller than what comes out
LOOKUPS = frozenset({"embedding", "gather", "index", "index_select"})  # read of a table only the entries they yield

Fused = Callable[[fx.Node], bool]  # whether an operator may run with others in a kernel
Kind = Literal["view", "copy", "loop", "alone", "collective", "wait"]  # a copy is made in what reads it


@dataclass(eq=False)
class Kernel:
    """Operators that run at once, in the program's order; `after` are the kernels whose results they need.

    The storages in `unwritten` are of values that only the kernel itself reads.
    """

    kind: Kind
    nodes: list[fx.Node]
    after: list[Kernel] = field(default_factory=list)
    moved_bytes: int = 0
    unwritten: frozenset[int] = frozenset()


def fuse(program: ir.Program, avals: Avals, fused: Fused = lambda node: True) -> list[Kernel]:
    """The program's kernels, each after those it needs, otherwise as the last of their operators stand.

    Of those that are not `fused` each operator is a kernel: what the eager backend runs.
    """
    found = Fusion(program, avals, fused)
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


def kind_of_kernel(node: fx.Node, avals: Avals) -> Kind:
    """What running an operator takes."""
    if node.target in WAITS:
        return "wait"
    if kind_of(node) is not None:
        return "collective"
    if is_mutable(node):
        return "loop"
    yielded = avals.storages(node)
    if yielded <= set().union(*(avals.storages(n) for n in node.all_input_nodes)):
        return "view"
    return "alone" if name_of(node) in ALONE or count_flops(node, avals) else "loop"


def is_last(node: fx.Node, avals: Avals) -> bool:
    """Whether what reads this loop cannot run in it: it reduces more than a row, or a long one."""
    operands = [v.layout.shape for n in node.all_input_nodes for v in tensors(avals.values[n])]
    if name_of(node) in LOOKUPS or not operands:
        return False
    largest = max(operands, key=math.prod)
    made = max((math.prod(v.layout.shape) for v in tensors(avals.values[node])), default=0)
    row = largest[-1] if largest else 1
    return made < math.prod(largest) and (row > ROW or made * row < math.prod(largest))


def is_cheap(node: fx.Node, avals: Avals) -> bool:
    """Whether a value is made of the entries of one other, which comes first, and of what is small beside it."""
    pointwise = torch.Tag.pointwise in node.target.tags and name_of(node) not in COSTLY  # type: ignore[union-attr]
    if not (pointwise or name_of(node) in COPIES) or not isinstance(node.args[0], fx.Node):
        return False
    made = next(tensors(avals.values[node])).layout.shape
    first, *rest = ([v.layout.shape for v in tensors(avals.values[n])] for n in node.all_input_nodes)
    small = all(SMALL * math.prod(shape) <= math.prod(made) for shapes in rest for shape in shapes)
    return small and [math.prod(shape) for shape in first] == [math.prod(made)]


class Fusion:
    """Groups of operators; a group is known by one of its nodes, which `group` finds."""

    def __init__(self, program: ir.Program, avals: Avals, fused: Fused):
        self.avals = avals
        self.kinds = {node: kind_of_kernel(node, avals) for node in program.calls()}
        self.single = {node for node in self.kinds if not fused(node)}
        self.find_copies()
        self.needs: dict[fx.Node, set[fx.Node]] = {}  # the operators, views looked through, that a node reads
        self.readers: dict[fx.Node, set[fx.Node]] = {node: set() for node in self.kinds}
        for node in (*self.kinds, program.graph.output_node()):
            self.needs[node] = set().union(*(self.origins(n) for n in node.all_input_nodes))
            if self.kinds.get(node) not in ("view", "copy"):
                for source in self.needs[node]:
                    self.readers[source].add(node)
        self.last = {node for node, kind in self.kinds.items() if kind == "loop" and is_last(node, avals)}
        self.parent: dict[fx.Node, fx.Node] = {}

    def find_copies(self) -> None:
        """Mark what is cheap to make and read only by loops of its phase, through views and others so marked."""
        for node in reversed(self.kinds):
            is_loop = self.kinds[node] == "loop" and is_cheap(node, self.avals)
            if is_loop and node not in self.single and self.is_read_by_loops(node, ir.phase(node)):
                self.kinds[node] = "copy"

    def is_read_by_loops(self, node: fx.Node, phase: str) -> bool:
        """Whether all that reads a value is a loop of a phase that writes into nothing that was there."""

        def is_fine(user: fx.Node) -> bool:
            if self.kinds.get(user) == "view":
                return self.is_read_by_loops(user, phase)
            is_loop = self.kinds.get(user) in ("loop", "copy") and ir.phase(user) == phase
            return is_loop and user not in self.single and not is_mutable(user)

        return all(map(is_fine, node.users))

    def read(self, operand: fx.Node) -> fx.Node:
        """What a loop reads for an operand: what a copy was made of, in place of the copy."""
        while self.kinds.get(operand) in ("view", "copy"):
            if not any(self.kinds.get(n) == "copy" for n in self.above(operand)):
                return operand
            operand = operand.all_input_nodes[0]
        return operand

    def above(self, operand: fx.Node) -> list[fx.Node]:
        """A value and what it is a view or a copy of, one after another."""
        chain = [operand]
        while self.kinds.get(chain[-1]) in ("view", "copy") and chain[-1].all_input_nodes:
            chain.append(chain[-1].all_input_nodes[0])
        return chain

    def origins(self, node: fx.Node) -> set[fx.Node]:
        """The operators that made a value; none for an input."""
        if node not in self.kinds:
            return set()
        return self.needs[node] if self.kinds[node] in ("view", "copy") else {node}

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
                if kind == "loop" and together and not self.ends(source) and node not in self.single:
                    self.join(source, node)

    def ends(self, node: fx.Node) -> bool:
        """Whether what reads the node is in another kernel."""
        return self.kinds[node] != "loop" or node in self.last or node in self.single

    def join_sole_readers(self) -> None:
        """Join groups of loops with the one group of loops that reads them: no path leads around."""
        members = self.members()
        for root in reversed(list(members)):
            own = members[root]
            if any(self.ends(node) for node in own):
                continue
            outside = {self.group(reader) for node in own for reader in self.readers[node]} - {self.group(root)}
            if len(outside) == 1 and self.kinds.get(only := outside.pop()) == "loop" and only not in self.single:
                self.join(root, only)

    def members(self) -> dict[fx.Node, list[fx.Node]]:
        """The nodes of each group in order; groups in the order of their last nodes."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in reversed(self.kinds):
            if self.kinds[node] not in ("view", "copy"):
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
                kernel.unwritten = self.unwritten(kernel)
        return list(found.values())

    def read_bytes(self, kernel: Kernel) -> int:
        """Bytes of values made outside, each once, and no more of a storage than it holds."""
        own = set().union(*(self.made(node) for node in kernel.nodes))
        seen: dict[int, dict[fx.Node, int]] = {}
        for node in kernel.nodes:
            reads = node.all_input_nodes[1:] if name_of(node) == "copy_" else node.all_input_nodes
            limit = sum(v.layout.size_bytes for v in tensors(self.avals.values[node]))
            for operand in reads:
                is_table = name_of(node) in LOOKUPS and operand is node.args[0]
                source = self.read(operand)
                for value in tensors(self.avals.values[source]):
                    if value.storage not in own:
                        size = min(value.layout.size_bytes, limit) if is_table else value.layout.size_bytes
                        seen.setdefault(value.storage, {})[source] = size
        return sum(min(sum(sizes.values()), self.avals.storage_bytes[s]) for s, sizes in seen.items())

    def written_bytes(self, kernel: Kernel) -> int:
        """Bytes of results that are read outside, or that are written into what was there."""
        own, total = set(kernel.nodes), 0
        for node in kernel.nodes:
            made = self.made(node)
            kept = not self.readers[node] <= own
            for value in tensors(self.avals.values[node]):
                if kept or value.storage not in made:
                    total += value.layout.size_bytes
        return total

    def unwritten(self, kernel: Kernel) -> frozenset[int]:
        """Storages that exist only while the kernel computes: what it makes and nothing else reads, and copies."""
        own = set(kernel.nodes)
        inside = [node for node in kernel.nodes if self.readers[node] and self.readers[node] <= own]
        found = set[int]().union(*(self.made(node) for node in inside))
        for operand in (n for node in kernel.nodes for n in node.all_input_nodes):
            found.update(s for n in self.above(operand) if self.kinds.get(n) == "copy" for s in self.made(n))
        return frozenset(found)

    def made(self, node: fx.Node) -> set[int]:
        """The storages that a node brings into being."""
        given = set().union(*(self.avals.storages(n) for n in node.all_input_nodes))
        return self.avals.storages(node) - given
