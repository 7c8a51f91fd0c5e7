"""Inserted nodes have values and origins; moved nodes take their operands or users along, however long the chain."""

from __future__ import annotations

import operator

import torch
from torch import fx

from passes.ir import ir
from passes.ir.record import Origin
from passes.torch_private import FakeTensorMode
from passes.trace.editor import Editor, inline, move_after, move_before

aten = torch.ops.aten

LONG = 3000  # exceeds Python's recursion limit


def chains() -> tuple[fx.Graph, list[fx.Node], fx.Node]:
    """Return a graph with a chain, and a later node outside of the chain."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    nodes = [x]
    for _ in range(LONG):
        nodes.append(graph.call_function(torch.neg, (nodes[-1],)))
    other = graph.call_function(torch.abs, (y,))
    graph.output((nodes[-1], other))
    return graph, nodes[1:], other


def test_a_node_moves_behind_with_its_users():
    graph, chain, other = chains()
    move_after(chain[0], other)
    assert other < chain[0] and all(a < b for a, b in zip(chain, chain[1:]))
    graph.lint()


def test_a_node_moves_ahead_with_what_it_reads():
    graph, chain, other = chains()
    first = chain[0]
    first.prepend(other)
    move_before(chain[-1], other)
    assert chain[-1] < other and all(a < b for a, b in zip(chain, chain[1:]))
    graph.lint()


def small() -> tuple[ir.Context, list[fx.Node], fx.Node]:
    """Return two matrices, and the maximum of each row of the first, which comes from a line of a model."""
    ctx, graph = ir.Context(FakeTensorMode()), fx.Graph()
    edit = Editor(ctx, graph)
    with ctx.fake_mode:
        values = [torch.empty(2, 3), torch.empty(2, 3)]
    nodes = [graph.placeholder(name) for name in "xy"]
    for node, value in zip(nodes, values):
        ir.set_value(node, value)
    last = edit.call(aten.max.dim, (nodes[0], 1))
    ir.update(last, origin=Origin("model.py:3"), phase="forward", layer=None)
    graph.output(tuple(edit.call(aten.neg.default, (part,)) for part in getitems(edit, last)))
    return ctx, nodes, last


def getitems(edit: Editor, node: fx.Node) -> list[fx.Node]:
    return [edit.call(operator.getitem, (node, i)) for i in range(2)]


def printed(graph: fx.Graph) -> list[str]:
    return [f"{node.name}: {', '.join(map(str, node.args))}" for node in graph.nodes if node.op == "call_function"]


def test_an_operator_has_its_value_and_the_origin_of_another():
    ctx, (x, y), last = small()
    node = Editor.before(last, ctx).call(aten.add.Tensor, (x, y), {"alpha": 2})
    assert node.next is last and ir.example(node).shape == (2, 3)
    assert (ir.source(node), ir.phase(node)) == ("model.py:3", "forward")


def test_a_traced_function_takes_nodes_and_constants():
    ctx, (x, y), last = small()
    result = Editor.before(last, ctx).trace(lambda a, n, b: (a * n + b).t(), x, 2.0, y)
    assert printed(last.graph)[:3] == ["mul: x, 2.0", "add: mul, y", "t: add"]
    assert ir.example(result).shape == (3, 2) and ir.source(result) == "model.py:3"


def test_a_function_with_a_key_is_traced_once_for_operands_alike():
    ctx, (x, y), last = small()
    edit, calls = Editor.before(last, ctx), []

    def subtract(a, b, c):
        calls.append(1)
        return a - b - c

    for operands in ((x, y, x), (y, x, y), (x, y, y)):
        edit.trace(subtract, *operands, key="subtract")
    assert printed(last.graph)[:6] == [
        "sub: x, y", "sub_1: sub, x", "sub_2: y, x", "sub_3: sub_2, y", "sub_4: x, y", "sub_5: sub_4, y"]
    assert len(calls) == 2


def test_a_function_in_the_place_of_a_node_gives_each_of_its_results():
    ctx, _, last = small()
    new = inline(last, lambda x, dim: (x.sum(dim), x.prod(dim)), ctx)
    assert [node.name for node in new] == ["sum_1", "prod"] and {ir.source(node) for node in new} == {"model.py:3"}
    assert printed(new[0].graph)[2:] == ["neg_default: sum_1", "neg_default_1: prod"]
    new[0].graph.lint()
