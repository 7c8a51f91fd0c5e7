"""Find the matrices of which a weight consists, from the graph: it is several if its product is cut into parts.

    y = linear(x, w)                                     w [3072, 1024]
    q, k, v = split(y, [2048, 512, 512], -1)             three matrices: Parts(-2, 1, (4, 1, 1), 512)

    y = view(linear(x, w), [2, 64, 8, 192])              w [1536, 512], eight heads
    k, v = split(y, [128, 64], -1)                       two matrices, of rows of all heads: Parts(-2, 8, (2, 1), 64)

Parts that are joined again before the next matmul, as the halves of a rotated head are, belong to one matrix.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence

from torch import fx

from passes.ir import ir
from passes.ir.operators import argument, is_operator, name_of
from passes.rules import pointwise, reductions, rule_of, tensor_operands, views
from passes.rules.base import result_shapes

JOINS = ("cat", "stack", "slice_scatter", "index_put", "complex")
CUTS = ("split", "split_with_sizes", "unbind", "select", "slice")
PASSED = frozenset({*pointwise.RULES, *reductions.RULES, *views.RULES}) - {"topk", "sort"}

Factor = tuple[int, int]  # entries of a dim, and their distance in the product's last dim; 0 for other dims
Dims = list[list[Factor]]


def parts_of(product: fx.Node) -> tuple[int, tuple[int, ...], int] | None:
    """Return (outer, sizes, inner): the last dim of a product is `outer` x sum(sizes) x `inner`, cut into `sizes`.

    None if it is not cut.
    """
    if not ir.example(product).dim():
        return None
    *rows, columns = ir.example(product).shape
    nodes, dims = [product], [*([(n, 0)] for n in rows), [(columns, 1)]]
    while True:
        users = [user for node in nodes for user in node.users]
        if (cut := cut_of(nodes[0], users)) is not None:
            dim, sizes, pieces = cut
            if len(dims[dim]) != 1 or not dims[dim][0][1] or len(sizes) < 2 or are_joined(pieces):
                return None
            common, (_, distance) = math.gcd(*sizes), dims[dim][0]
            return columns // (sum(sizes) * distance), tuple(n // common for n in sizes), common * distance
        if len({(user.target, str(user.args[1:])) for user in users}) != 1:  # equal operators count as one
            return None
        after = follow(users[0], next(node for node in nodes if users[0] in node.users), dims)
        if after is None:
            return None
        nodes, dims = users, after


def follow(user: fx.Node, node: fx.Node, dims: Dims) -> Dims | None:
    """Return the dims of the result of an operator that rearranges or changes the entries of `node`; otherwise None."""
    if not is_operator(user) or not ir.is_tensor(user):
        return None
    rule = rule_of(user)
    if rule.moves and tensor_operands(user) == [node]:
        factors: dict[str, list[Factor]] = {}
        for names, dim in zip(rule.operands[0], dims, strict=True):
            groups = regroup(dim, [rule.sizes[name] for name in names])
            if groups is None:
                return None
            factors |= zip(names, groups)
        return [[factor for name in names for factor in factors[name]] for names in rule.results[0]]
    is_alike = name_of(user) in pointwise.RULES and ir.example(user).shape == ir.example(node).shape
    return dims if is_alike else None


def regroup(factors: Sequence[Factor], sizes: Sequence[int]) -> list[list[Factor]] | None:
    """Return the factors of a dim in groups of these sizes, some of them split; None if this is not possible."""
    left, groups = [factor for factor in factors if factor[0] > 1], list[list[Factor]]()
    for needed in sizes:
        groups.append([])
        while needed > 1:
            size, distance = left.pop(0)
            taken = min(size, needed)
            if max(size, needed) % taken:
                return None
            if size > taken:
                left.insert(0, (size // taken, distance))
            groups[-1].append((taken, distance * (size // taken)))
            needed //= taken
    return groups


def cut_of(node: fx.Node, users: Sequence[fx.Node]) -> tuple[int, tuple[int, ...], list[fx.Node]] | None:
    """Return the dim, the sizes and the nodes of the parts into which all `users` cut a value; None if they do not."""
    shape, dims, runs, pieces = ir.example(node).shape, set[int](), set[tuple[int, int]](), list[fx.Node]()
    for user in users:
        if not is_operator(user) or name_of(user) not in CUTS:
            return None
        dims.add(dim := argument(user, "dim") % len(shape))
        runs.update(runs_of(user, dim, shape[dim]))
        pieces += [user] if ir.is_tensor(user) else [n for n in user.users if n.target is operator.getitem]
    if len(dims) != 1 or (0, shape[dim]) in runs:
        return None
    steps = {argument(user, "step", 1) or 1 for user in users}
    if steps != {1}:  # every k-th entry: of `dim` as (n / k, k), single entries of the last
        (step,) = steps if len(steps) == 1 else (0,)
        return (dim, (1,) * step, pieces) if step and shape[dim] % step == 0 else None
    ends = sorted({0, shape[dim]}.union(*runs))
    return dim, tuple(b - a for a, b in zip(ends, ends[1:])), pieces


def runs_of(user: fx.Node, dim: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last index (exclusive) of each part that an operator cuts out."""
    name = name_of(user)
    if name == "slice":
        start, end, step = (argument(user, key) for key in ("start", "end", "step"))
        start, end = ((value + size if value < 0 else value) for value in (start or 0, size if end is None else end))
        yield (min(start, size), min(end, size)) if step == 1 else (start, start + 1)
    elif name == "select":
        index = argument(user, "index") % size
        yield index, index + 1
    else:
        at = 0
        for shape in result_shapes(user):
            length = 1 if name == "unbind" else shape[dim]
            yield at, at + length
            at += length


def is_passed(node: fx.Node) -> bool:
    """Return True for an operator that is elementwise, a reduction, or rearranges entries."""
    return is_operator(node) and name_of(node) in PASSED


def are_joined(pieces: Sequence[fx.Node]) -> bool:
    """Return True if two parts, changed entry by entry, become different operands of one join."""
    operands: dict[fx.Node, dict[fx.Node, int]] = {}
    for number, piece in enumerate(pieces):
        waiting, visited = [piece], {piece}
        while waiting:
            node = waiting.pop()
            for user in node.users:
                is_join = is_operator(user) and name_of(user) in JOINS
                if is_join:
                    joined = operands.setdefault(user, {})
                    if any(other is not node and k != number for other, k in joined.items()):
                        return True
                    joined[node] = number
                if user not in visited and (is_join or user.target is operator.getitem or is_passed(user)):
                    visited.add(user)
                    waiting.append(user)
    return False
