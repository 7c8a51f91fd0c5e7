"""Bodies are known by their text: what may differ between two calls, what may not, and the way back to one graph."""

from __future__ import annotations

import pytest
import torch
from small_programs import Small, cut
from torch import fx

from passes.ir import ir
from passes.ir.bodies import Body, calls_of, cut_out, describe_operand, flatten, insert_call, key_of, text_of
from passes.ir.printer import print_program
from passes.ir.spec import Spec

aten = torch.ops.aten


def layers(factors, shape=(3, 4)):
    """A chain of layers, x -> tanh(x * factor) + x, and the nodes of each."""
    small = Small()
    x, pieces = small.input("x", cut(shape), "batch"), []
    for factor in factors:
        scaled = small.call(aten.mul.Tensor, x, factor)
        bent = small.call(aten.tanh.default, scaled)
        x_next = small.call(aten.add.Tensor, bent, x)
        pieces.append((scaled, bent, x_next))
        x = x_next
    return small.program([("loss", "loss", small.call(aten.sum.default, x), Spec(()))]), pieces


def key(nodes):
    piece = cut_out(nodes, [nodes[-1]])
    return key_of(text_of(piece.graph(piece.positions())))


def test_layers_alike_have_one_key_whatever_their_nodes_are_called():
    _, (first, second) = layers([0.5, 0.5])
    assert [node.name for node in first] != [node.name for node in second] and key(first) == key(second)


@pytest.mark.parametrize(("one", "other"), [(0.5, 0.25), (1, 1.0), (1, True), (0.0, -0.0)])
def test_another_constant_is_another_key(one, other):
    keys = {key(nodes) for factor in (one, other) for nodes in layers([factor])[1]}
    assert len(keys) == 2


def test_another_layout_is_another_key():
    (_, (one,)), (_, (other,)) = layers([0.5], (3, 4)), layers([0.5], (4, 3))
    assert key(one) != key(other)


def test_other_results_are_another_key():
    _, (nodes,) = layers([0.5])
    piece = cut_out(nodes, nodes[-2:])
    assert key(nodes) != key_of(text_of(piece.graph(piece.positions())))


def called(program, pieces):
    """The program as calls of the body of its layers."""
    graph, env = fx.Graph(), {}
    first = cut_out(pieces[0], [pieces[0][-1]])
    body_graph = first.graph(first.positions())
    body = Body("layer", body_graph, key_of(text_of(body_graph)), first.positions())
    ends = {nodes[-1]: cut_out(nodes, [nodes[-1]]) for nodes in pieces}
    inside = {node for nodes in pieces for node in nodes}
    for node in program.graph.nodes:
        if node in ends:
            insert_call(graph, body, ends[node], env)
        elif node not in inside:
            env[node] = graph.node_copy(node, env.__getitem__)
    return program.with_graph(graph)


def test_calls_put_in_line_are_the_program():
    program, pieces = layers([0.5, 0.5, 0.5])
    calls = called(program, pieces)
    assert [len(nodes) for nodes in calls_of(calls).values()] == [3]
    assert print_program(flatten(calls)) == print_program(program)
    assert flatten(program) is program  # nothing to put in line


def test_a_constant_without_a_text_of_its_own_is_refused():
    with pytest.raises(ir.CompileError, match="constant of type object"):
        describe_operand([1, object()], {})
