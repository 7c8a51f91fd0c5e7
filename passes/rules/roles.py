"""Find the uses of parameters, from the graph.

    embedding     a table in which entries are looked up
    head          in a matmul that no other follows
    router        in a matmul whose result a top-k reads
    matrix        in a matmul, or in a convolution of all channels
    convolution   in a convolution

A parameter in a matmul may be cast, rearranged, quantized, or added to another one before.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import fx

from passes.ir import ir
from passes.ir.operators import is_operator, name_of
from passes.ir.slices import weight_nodes
from passes.rules import rule_of, tensor_operands
from passes.rules.base import result_shapes
from passes.rules.losses import IN_CHUNKS
from passes.rules.matrices import PASSED, parts_of

MATMULS = ("linear", "mm", "matmul")
CONVOLUTIONS = ("convolution", "ct::causal_conv1d")
FACTORS = {"addmm": (1, 3)} | dict.fromkeys(("linear", *CONVOLUTIONS, *IN_CHUNKS), (1, 2))  # operands: first, end
BY_ROWS = ("linear", *IN_CHUNKS)  # the rows of these weights are columns of the product
PRODUCTS = (*CONVOLUTIONS, *MATMULS, "addmm", "bmm", "mv", "ct::expert_mm", "ct::grouped_mm", "ct::each_mm", *IN_CHUNKS)
LOOKUPS = ("embedding", "index_select", "index", "gather", "_embedding_bag")


def keeps_dims(node: fx.Node) -> bool:
    """Return True if an operator keeps its operand's dims: reordered, with new dims of size 1, or cast."""
    if name_of(node) in ("_to_copy", "alias"):
        return True
    rule = rule_of(node)
    before, after = (sorted(filter(None, dims[0])) for dims in (rule.operands, rule.results))
    return rule.moves and before == after


def root(node: fx.Node, parameters: Collection[fx.Node]) -> fx.Node | None:
    """Return the parameter whose transpose, cast or view with the same dims the node is; None if there is none."""
    while node not in parameters:
        if not is_operator(node) or len(tensor_operands(node)) != 1 or not keeps_dims(node):
            return None
        node = node.args[0]  # type: ignore[assignment]
    return node


def last_of(program: ir.Program, layers: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes of `layers` whose results reach no other of them."""
    before = set[fx.Node]()  # nodes whose results reach a layer
    for node in reversed(list(program.calls())):
        if any(user in before or user in layers for user in node.users):
            before.add(node)
    return set(layers) - before


def roles(program: ir.Program) -> Mapping[str, frozenset[str]]:
    """Map parameter names to their uses; parameters without any are left out."""
    names = {n: i.name for n, i in zip(program.placeholders(), program.inputs) if i.kind in ir.WEIGHTS}
    uses_by_name: dict[str, set[str]] = {}

    def add(role: str, nodes: Iterable[fx.Node | None]) -> None:
        for node in filter(None, nodes):
            uses_by_name.setdefault(names[node], set()).add(role)

    matmuls = [n for n in program.calls() if name_of(n) in (*MATMULS, *IN_CHUNKS)]
    add("head", (root(operand, names) for node in last_of(program, matmuls) for operand in tensor_operands(node)[:2]))
    lookups = [tensor_operands(n)[0] for n in program.calls() if is_operator(n) and name_of(n) in LOOKUPS]
    add("embedding", (node for node in (root(n, names) for n in lookups) if node and ir.example(node).dim() == 2))
    ranked = read_by_top_k(program)
    for parameter, node, _ in products(program):
        if name_of(node) in CONVOLUTIONS:
            add("convolution", [parameter])
        if name_of(node) not in CONVOLUTIONS or mixes_channels(node):
            add("matrix", [parameter])
        if node in ranked:
            add("router", [parameter])
    return {name: frozenset(uses) for name, uses in uses_by_name.items()}


def mixes_channels(node: fx.Node) -> bool:
    """Return True for a convolution in which each result depends on all channels."""
    return name_of(node) == "convolution" and node.args[8] == 1


def products(program: ir.Program) -> Iterator[tuple[fx.Node, fx.Node, int | None]]:
    """Yield each parameter with a matmul or convolution that it is in, and its dim that the result's last dim is.

    The dim is -1 or -2, or None for the left operand of a matmul, a convolution, and rearranged weights.
    """
    parameters = {n for n, i in zip(program.placeholders(), program.inputs) if i.kind in ir.WEIGHTS}
    weights = parameters.union(weight_nodes(program))
    for node in program.calls():
        name = name_of(node) if is_operator(node) else ""
        if name in PRODUCTS:
            first, last = FACTORS.get(name, (0, 2))
            for position, operand in enumerate(node.args[first:last], first):
                dim = None if position < last - 1 or name in CONVOLUTIONS else -2 if name in BY_ROWS else -1
                for parameter, place in origins(operand, dim, parameters, weights):  # type: ignore[arg-type]
                    yield parameter, node, place


def origins(
    operand: fx.Node, dim: int | None, parameters: Collection[fx.Node], weights: Collection[fx.Node]
) -> Iterator[tuple[fx.Node, int | None]]:
    """Yield the parameters of which an operand is made, or a part, each with the dim that is its `dim`."""
    waiting = [(operand, dim)]
    while waiting:
        node, dim = waiting.pop()
        node = node.args[0] if node.target is operator.getitem else node  # type: ignore[assignment]
        if node in parameters:
            yield node, dim
        elif node in weights:
            waiting += [(n, dim_before(node, n, dim)) for n in tensor_operands(node) if is_source(n, node)]


def is_source(operand: fx.Node, node: fx.Node) -> bool:
    """Return True unless an operand only scales others: it has the entries of the result, or the result repeats its."""
    value, results = ir.example(operand), result_shapes(node)
    return value.dim() > 1 and (name_of(node) == "expand" or value.numel() >= math.prod(results[0]))


def dim_before(node: fx.Node, operand: fx.Node, dim: int | None) -> int | None:
    """Return the dim, -1 or -2, of an operand that becomes a dim of the result; None if there is none."""
    rule, shape = rule_of(node), tuple(ir.example(operand).shape)
    if dim is None or len(shape) < 2:
        return None
    if not rule.moves:  # entry by entry, or one of a stack of matrices
        return dim if result_shapes(node)[0][-2:] == shape[-2:] else None
    names, result = rule.operands[0], rule.results[0]
    return next((d for d in (-1, -2) if names[d] == result[dim] and names[d]), None)


def read_by_top_k(program: ir.Program) -> set[fx.Node]:
    """Return the values that a top-k reads, changed entry by entry, reduced or rearranged."""
    read: set[fx.Node] = set()
    for node in reversed(list(program.calls())):
        if is_operator(node) and (name_of(node) == "topk" or node in read and name_of(node) in PASSED):
            read.update(tensor_operands(node))
        elif node.target is operator.getitem and node in read:
            read.update(node.all_input_nodes)
    return read


def matrices(program: ir.Program) -> Mapping[str, ir.Parts]:
    """Map the names of weights that consist of several matrices to these; all their products must be cut alike."""
    names = {n: i.name for n, i in zip(program.placeholders(), program.inputs)}
    parts_by_name: dict[str, set[ir.Parts | None]] = {}
    for parameter, node, dim in products(program):
        cut = None if dim is None or name_of(node) in IN_CHUNKS else parts_of(node)
        parts_by_name.setdefault(names[parameter], set()).add(cut and ir.Parts(dim, *cut))  # type: ignore[arg-type]
    return {name: parts for name, (parts, *others) in parts_by_name.items() if parts and not others}
