"""Find the tensor-parallel plan of a model in its graph: Megatron's pairs of column and row shards (arXiv:1909.08053).

    y = linear(x, w1); z = silu(y); o = linear(z, w2)     ->     w1 {"tp": 0}, w2 {"tp": 1}

The output dim of a weight is followed through the graph by the rules. If every path ends in a matmul that sums it with
another weight, the first weight is split by columns and the second by rows; biases and scales on the way are split
alike. If every path ends in the loss, the dim is a vocabulary. If a path needs the full dim (a norm of the residual
stream, a router), the weight is not split. Embeddings looked up by entries of the batch are split by vocabulary. Shards
respect the factors that views give a dim: heads are never cut.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from passes.ir import ir
from passes.ir.operators import is_operator, name_of
from passes.rules import Rule, rule_of, tensor_operands
from passes.rules.losses import IN_CHUNKS
from passes.rules.roles import root


@dataclass(frozen=True)
class Blocks:
    """A dim as `outer * size * inner` entries, of which `size` (the heads, for example) is split over the axis."""

    dim: int
    outer: int
    size: int
    inner: int

    def refine(self, part: Part) -> Blocks:
        """Return the same dim, split by a part of the blocks only."""
        return Blocks(self.dim, self.outer * part[0], part[1], part[2] * self.inner)


Part = tuple[int, int, int]  # blocks, or a factor, as `major * split * minor`; only `split` is sharded


@dataclass
class Trail:
    """The outcome of following blocks: weights that share them, and how they were reduced."""

    part: Part  # the finest part that some use needs split
    weights: dict[fx.Node, Blocks] = field(default_factory=dict)
    contracted: bool = False  # summed in a matmul with a weight
    folded: bool = False  # reduced without a weight

    def join(self, other: Trail) -> None:
        """Merge another trail into this one."""
        self.weights |= other.weights
        self.part = min(self.part, other.part, key=lambda part: part[1])
        self.contracted |= other.contracted
        self.folded |= other.folded

    def within(self, part: Part) -> Trail:
        """Return the trail of a part of some blocks as a trail of the blocks."""
        return replace(self, part=(part[0] * self.part[0], self.part[1], self.part[2] * part[2]))


Plan = dict[str, Blocks]
Search = Generator[Any, Any, Trail | None]  # yields the searches whose results it needs, and is sent them


def infer(program: ir.Program, parts: int) -> Plan:
    """Map parameter names to the dim to split over `parts` ranks, and its blocks; other parameters are not split."""
    finder = _Finder(program, parts)
    for node in program.calls():
        if is_operator(node):
            finder.visit(node)
    names = {node: input_.name for node, input_ in zip(program.placeholders(), program.inputs)}
    return {names[node]: blocks for node, blocks in sorted(finder.splits.items(), key=lambda item: names[item[0]])}


def result_of(search: Search) -> Trail | None:
    """Run a search on an explicit stack: an unrolled recurrence goes through thousands of operators."""
    stack, trail = [search], None
    while stack:
        try:
            stack.append(stack[-1].send(trail))
            trail = None
        except StopIteration as end:
            stack.pop()
            trail = end.value
    return trail


def experts_of(program: ir.Program) -> dict[str, int]:
    """Map the names of expert weights to the dim that counts experts.

    A parameter is an expert weight if sorted rows use it by expert, or if a matmul by expert is summed over the
    experts, as in a mixture that sends all tokens through all of them.
    """
    finder, dims = _Finder(program, 1), dict[str, int]()
    names = {node: input_.name for node, input_ in zip(program.placeholders(), program.inputs)}
    for operand, dim in (pair for node in program.calls() for pair in finder.expert_operands(node)):
        if (root := finder.root(operand)) is not None:
            dims[names[root]] = finder.dim_of_root(operand, dim)
    return dims


def products_of_all(program: ir.Program) -> list[fx.Node]:
    """Return the matmuls that send all tokens through all experts."""
    finder = _Finder(program, 1)
    return [node for node in program.calls() if name_of(node) == "bmm" and finder.expert_operands(node)]


class _Finder:
    def __init__(self, program: ir.Program, parts: int):
        self.parts, self.splits = parts, dict[fx.Node, Blocks]()
        kinds = {node: input_.kind for node, input_ in zip(program.placeholders(), program.inputs)}
        self.parameters = {node for node, kind in kinds.items() if kind in ir.WEIGHTS}
        self.batch = {node for node, kind in kinds.items() if kind == "batch"}
        self.state = {node for node, out in zip(program.results(), program.outputs) if out.kind == "buffer"}

    def visit(self, node: fx.Node) -> None:
        """Split the weight of an embedding or a matmul, if all paths of its dim end well."""
        if name_of(node) == "embedding":
            weight, ids = tensor_operands(node)
            if self.root(weight) is not None and self.is_from_batch(ids):
                self.split(weight, Blocks(0, 1, ir.example(weight).shape[0], 1), None)
            return
        if name_of(node) in IN_CHUNKS:
            _, weight, _, *others = tensor_operands(node)  # a bias, or the weight of another head
            for operand in (weight, *others):
                if self.root(operand) is not None:
                    self.split(operand, Blocks(0, 1, ir.example(operand).shape[0], 1), None)
            return
        for operand, names in self.matmul_operands(node):
            if self.root(operand) is None:
                continue
            rule = rule_of(node)
            free = {n: d for d, dim in enumerate(names) for n in dim if n not in rule.reduced and n not in rule.whole}
            if len(set(free.values())) == 1:
                name, dim = next(iter(free.items()))
                self.split(operand, blocks_of(rule, names[dim], name, dim, (1, rule.sizes[name], 1)), (node, name))

    def expert_operands(self, node: fx.Node) -> list[tuple[fx.Node, int]]:
        """Return (operand, the dim that counts experts) of an operator that uses weights by expert."""
        name = name_of(node)
        if name in ("ct::expert_mm", "ct::of_expert"):
            return [(tensor_operands(node)[-2], 0)]
        if name not in ("bmm", "ct::each_mm") or sum(self.root(x) is not None for x in tensor_operands(node)) != 1:
            return []
        trail = result_of(self.follow(node, Blocks(0, 1, ir.example(node).shape[0], 1), {}))
        summed = trail is not None and trail.folded and not trail.contracted and trail.part[0] == trail.part[2] == 1
        return [(x, 0) for x in tensor_operands(node) if self.root(x) is not None] if summed else []

    def matmul_operands(self, node: fx.Node) -> list[tuple[fx.Node, tuple]]:
        """Return the matrices of a matmul (or the stacks of one matrix for each expert), with their factors."""
        if name_of(node) == "convolution":
            return [(tensor_operands(node)[1], rule_of(node).operands[1])]
        dims = {"linear": 2, "mm": 2, "matmul": 2, "ct::grouped_mm": 3, "ct::expert_mm": 3}.get(name_of(node))
        if dims is None:
            return []
        return [(n, names) for n, names in zip(tensor_operands(node), rule_of(node).operands) if len(names) == dims]

    def root(self, node: fx.Node) -> fx.Node | None:
        """Return the parameter that the node is, up to the order of its dims; None if it is none."""
        return root(node, self.parameters)

    def is_from_batch(self, node: fx.Node) -> bool:
        """Return True if ids come straight from the batch, not from positions or constants."""
        while node not in self.batch:
            operands = tensor_operands(node) if is_operator(node) else []
            if len(operands) != 1:
                return False
            node = operands[0]
        return True

    def split(self, weight: fx.Node, start: Blocks, product: tuple[fx.Node, str] | None) -> None:
        """Record the split of a weight, and of all weights on its trail, if the trail ends well."""
        root = self.root(weight)
        if root in self.splits and self.splits[root].dim != self.dim_of_root(weight, start.dim):
            return  # already split by rows: its results are summed
        if product is None:
            trail: Trail | None = Trail((1, start.size, 1), folded=True)
        else:
            node, name = product
            rule = rule_of(node)
            out, names = next((d, names) for d, names in enumerate(rule.results[0]) if name in names)
            trail = result_of(self.follow(node, blocks_of(rule, names, name, out, (1, start.size, 1)), {}))
        if trail is None or trail.contracted == trail.folded or trail.part[1] < self.parts:
            return
        for operand, blocks in {**trail.weights, weight: start.refine(trail.part)}.items():
            root = self.root(operand)
            if root is not None and root not in self.splits:
                self.splits[root] = replace(blocks, dim=self.dim_of_root(operand, blocks.dim))

    def dim_of_root(self, node: fx.Node, dim: int) -> int:
        """Return the parameter's dim that became `dim` of its transpose."""
        while node not in self.parameters:
            rule = rule_of(node)
            dim = rule.operands[0].index(rule.results[0][dim])
            node = node.args[0]  # type: ignore[assignment]
        return dim

    # -- following a dim ------------------------------------------------------------------------------

    def follow(self, node: fx.Node, blocks: Blocks, memo: dict) -> Search:
        """Follow the blocks of a value through all its uses; None if some use needs them unsplit."""
        key = (node, blocks)
        if key in memo:
            return memo[key]
        memo[key] = trail = Trail((1, blocks.size, 1))
        for user in node.users:
            if user.op == "output" and node in self.state:
                continue  # an updated buffer is gathered at the output
            result = (yield self.through(user, node, blocks, memo)) if user.op != "output" else None
            if result is None:
                memo[key] = None
                return None
            trail.join(result)
        return trail

    def through(self, user: fx.Node, node: fx.Node, blocks: Blocks, memo: dict) -> Search:
        """Follow the blocks through one use: of several ways, take the first that ends well."""
        if not is_operator(user):
            return (yield self.follow(user, blocks, memo))  # an element of a tuple
        rule, operands = rule_of(user), tensor_operands(user)
        trail = Trail((1, blocks.size, 1))
        for i in (i for i, n in enumerate(operands) if n is node):
            ways = [self.use(user, operands, rule, *candidate, memo) for candidate in candidates(rule, i, blocks)]
            if (first := (yield first_of(ways))) is None:
                return None
            trail.join(first)
        return trail

    def use(
        self, user: fx.Node, operands: list[fx.Node], rule: Rule, name: str, cut: Part, part: Part, memo: dict
    ) -> Search:
        """Split a factor of the operator: its weights with the factor are split too, and its results are followed."""
        if name in rule.whole:
            return None
        trail = Trail((1, cut[1], 1))
        for d, names in ((d, names) for dims in rule.results for d, names in enumerate(dims) if name in names):
            further = yield self.follow(user, blocks_of(rule, names, name, d, cut), memo)
            if further is None:
                return None
            trail.join(further)
        for operand, dims in zip(operands, rule.operands):
            for d, names in enumerate(dims):
                if name in names and self.root(operand) is not None:
                    trail.weights[operand] = blocks_of(rule, names, name, d, cut).refine(trail.part)
        if name in rule.reduced:
            trail.contracted, trail.folded = bool(trail.weights), not trail.weights
        return trail.within(part)


def first_of(ways: list[Search]) -> Search:
    """Return the first result that is not None."""
    for way in ways:
        if (trail := (yield way)) is not None:
            return trail
    return None


def candidates(rule: Rule, i: int, blocks: Blocks) -> list[tuple[str, Part, Part]]:
    """List the factors of an operand's dim that lie within the blocks or around them, major first.

    Each comes as (factor, the position of the blocks in it, the part of the blocks that it is).
    """
    inner, factors = 1, list[tuple[str, Part, Part]]()
    low, high = blocks.inner, blocks.inner * blocks.size
    for name in reversed(rule.operands[i][blocks.dim]):
        size = rule.sizes[name]
        top = inner * size
        if top <= high and not inner % low and not high % top:
            factors.append((name, (1, size, 1), (high // top, size, inner // low)))
        elif top >= high and not low % inner and not top % high:
            factors.append((name, (top // high, blocks.size, low // inner), (1, blocks.size, 1)))
        inner = top
    return factors[::-1]


def blocks_of(rule: Rule, names: tuple[str, ...], name: str, dim: int, cut: Part) -> Blocks:
    """Return the blocks of a dim that a part of one of its factors makes."""
    at = names.index(name)
    outer, inner = (math.prod(rule.sizes[n] for n in part) for part in (names[:at], names[at + 1 :]))
    return Blocks(dim, outer * cut[0], cut[1], cut[2] * inner)
