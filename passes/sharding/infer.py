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
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from passes.ir import ir
from passes.ir.operators import is_operator, name_of
from passes.ir.slices import weight_nodes
from passes.rules import Rule, rule_of, tensor_operands
from passes.rules.losses import IN_CHUNKS


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


Dims = Sequence[tuple[str, ...]]  # the factors of each dim
Part = tuple[int, int, int]  # blocks, or a factor, as `major * split * minor`; only `split` is sharded


@dataclass
class Trail:
    """The outcome of following blocks: weights that share them, and how they were reduced."""

    part: Part  # the finest part that some use needs split
    weights: dict[fx.Node, Blocks] = field(default_factory=dict)  # parameters
    contracted: bool = False  # summed in a matmul with a weight
    folded: bool = False  # reduced without a weight

    def join(self, other: Trail) -> None:
        """Merge another trail into this one."""
        self.weights |= other.weights
        self.part = min(self.part, other.part, key=lambda part: part[1])
        self.contracted |= other.contracted
        self.folded |= other.folded

    def joined(self, other: Trail) -> Trail:
        """Return both trails as one."""
        both = replace(self, weights={**self.weights})
        both.join(other)
        return both

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


def experts_of(program: ir.Program) -> Plan:
    """Map the names of expert weights to the dim that counts experts, or to the blocks of a dim that do.

    A parameter is an expert weight if sorted rows use it by expert, or if a matmul by expert is summed over the
    experts, as in a mixture that sends all tokens through all of them.
    """
    finder, plan = _Finder(program, 1), Plan()
    names = {node: input_.name for node, input_ in zip(program.placeholders(), program.inputs)}
    for operand, blocks in (pair for node in program.calls() for pair in finder.expert_operands(node)):
        trail = result_of(finder.made_of(operand, blocks))
        if trail is not None and trail.part == (1, blocks.size, 1):
            plan |= {names[node]: blocks for node, blocks in trail.weights.items()}
    return plan


def products_of_all(program: ir.Program) -> list[fx.Node]:
    """Return the matmuls that send all tokens through all experts."""
    finder = _Finder(program, 1)
    return [node for node in program.calls() if name_of(node) == "bmm" and finder.expert_operands(node)]


class _Finder:
    def __init__(self, program: ir.Program, parts: int):
        self.parts, self.splits = parts, dict[fx.Node, Blocks]()
        self.made = dict[tuple[fx.Node, Blocks], Trail | None]()
        kinds = {node: input_.kind for node, input_ in zip(program.placeholders(), program.inputs)}
        self.parameters = {node for node, kind in kinds.items() if kind in ir.WEIGHTS}
        self.batch = {node for node, kind in kinds.items() if kind == "batch"}
        self.state = {node for node, out in zip(program.results(), program.outputs) if out.kind == "buffer"}
        tables = {node for node, kind in kinds.items() if kind == "buffer"} - self.state
        self.weights = self.parameters.union(weight_nodes(program, tables))

    def visit(self, node: fx.Node) -> None:
        """Split the weight of an embedding or a matmul, if all paths of its dim end well."""
        if name_of(node) == "embedding":
            weight, ids = tensor_operands(node)
            if weight in self.weights and self.is_from_batch(ids):
                self.split(weight, Blocks(0, 1, ir.example(weight).shape[0], 1), None)
            return
        if name_of(node) in IN_CHUNKS:
            _, weight, _, *others = tensor_operands(node)  # a bias, or the weight of another head
            for operand in (weight, *others):
                if operand in self.weights:
                    self.split(operand, Blocks(0, 1, ir.example(operand).shape[0], 1), None)
            return
        for operand, names in self.matmul_operands(node):
            if operand not in self.weights:
                continue
            rule = rule_of(node)
            free = {n: d for d, dim in enumerate(names) for n in dim if n not in rule.reduced and n not in rule.whole}
            if len(set(free.values())) == 1:
                name, dim = next(iter(free.items()))
                self.split(operand, blocks_of(rule, names[dim], name, dim, (1, rule.sizes[name], 1)), (node, name))

    def expert_operands(self, node: fx.Node) -> list[tuple[fx.Node, Blocks]]:
        """Return (operand, the dim that counts experts) of an operator that uses weights by expert."""
        name, operands = name_of(node), tensor_operands(node)
        if name in ("ct::expert_mm", "ct::of_expert"):
            return [(operands[-2], Blocks(0, 1, ir.example(operands[-2]).shape[0], 1))]
        if name not in ("bmm", "ct::each_mm") or sum(x in self.weights for x in operands) != 1:
            return []
        each = Blocks(0, 1, ir.example(node).shape[0], 1)
        trail = result_of(self.follow(node, each, {}))
        summed = trail is not None and trail.folded and not trail.contracted and trail.part[0] == trail.part[2] == 1
        return [(x, each) for x in operands if x in self.weights] if summed else []

    def matmul_operands(self, node: fx.Node) -> list[tuple[fx.Node, tuple]]:
        """Return the matrices of a matmul (or the stacks of one matrix for each expert), with their factors."""
        if name_of(node) == "convolution":
            return [(tensor_operands(node)[1], rule_of(node).operands[1])]
        dims = {"linear": 2, "mm": 2, "matmul": 2, "ct::grouped_mm": 3, "ct::expert_mm": 3}.get(name_of(node))
        if dims is None:
            return []
        return [(n, names) for n, names in zip(tensor_operands(node), rule_of(node).operands) if len(names) == dims]

    def made_of(self, node: fx.Node, blocks: Blocks) -> Search:
        """Find the parameters of which a weight is made, with the blocks that become its blocks, or a part of these.

        A weight that is stored as codes is made of codes and scales, and can be split between whole blocks. The result
        is None if an operator on the way needs the dim as a whole.
        """
        key = (node, blocks)
        if key not in self.made:
            self.made[key] = yield self.made_before(node, blocks)
        return self.made[key]

    def made_before(self, node: fx.Node, blocks: Blocks) -> Search:
        """Do as `made_of`, through one operator: of several ways, take the first that ends well."""
        if node not in self.weights:
            return Trail((1, blocks.size, 1))  # a table or a constant, of which each rank takes its part
        if node in self.parameters:
            return Trail((1, blocks.size, 1), {node: blocks})
        if not is_operator(node) or not ir.is_tensor(node):
            return None
        rule, operands = rule_of(node), tensor_operands(node)
        for name, cut, part in candidates(rule, rule.results[0], blocks):
            trail: Trail | None = Trail((1, cut[1], 1)) if name not in rule.whole else None
            for operand, dims in zip(operands, rule.operands):
                for d, names in ((d, names) for d, names in enumerate(dims) if name in names):
                    before = (yield self.made_of(operand, blocks_of(rule, names, name, d, cut))) if trail else None
                    trail = trail.joined(before) if trail and before else None
            if trail and trail.weights:
                return trail.within(part)
        return None

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
        made = result_of(self.made_of(weight, start))
        if made is None or any(self.is_split_by_rows(node, blocks) for node, blocks in made.weights.items()):
            return
        if product is None:
            trail: Trail | None = Trail((1, made.part[1], 1), folded=True)
        else:
            node, name = product
            rule = rule_of(node)
            out, names = next((d, names) for d, names in enumerate(rule.results[0]) if name in names)
            trail = result_of(self.follow(node, blocks_of(rule, names, name, out, made.part), {}))
        if trail is None or trail.contracted == trail.folded or trail.part[1] < self.parts:
            return
        made = result_of(self.made_of(weight, start.refine(trail.within(made.part).part)))
        assert made is not None
        for node, blocks in {**trail.weights, **made.weights}.items():
            self.splits.setdefault(node, blocks)

    def is_split_by_rows(self, node: fx.Node, blocks: Blocks) -> bool:
        """Return True if the results of a parameter are summed already: it is split along another dim."""
        return node in self.splits and self.splits[node].dim != blocks.dim

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
            ways = [self.use(user, operands, rule, *way, memo) for way in candidates(rule, rule.operands[i], blocks)]
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
                if name in names and operand in self.weights:
                    made = yield self.made_of(operand, blocks_of(rule, names, name, d, cut).refine(trail.part))
                    if made is not None:
                        trail.join(made.within(trail.part))
        if name in rule.reduced:
            trail.contracted, trail.folded = bool(trail.weights), not trail.weights
        return trail.within(part)


def first_of(ways: list[Search]) -> Search:
    """Return the first result that is not None."""
    for way in ways:
        if (trail := (yield way)) is not None:
            return trail
    return None


def candidates(rule: Rule, dims: Dims, blocks: Blocks) -> list[tuple[str, Part, Part]]:
    """List the factors of a dim of an operand or result that lie within the blocks or around them, major first.

    Each comes as (factor, the position of the blocks in it, the part of the blocks that it is).
    """
    inner, factors = 1, list[tuple[str, Part, Part]]()
    low, high = blocks.inner, blocks.inner * blocks.size
    for name in reversed(dims[blocks.dim]):
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
