"""A layer that stands for others is repeated by value, and a layer that does not lie like its neighbours is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_programs import Small, cut
from torch import fx

from passes.ir import ir
from passes.ir.bodies import Body, cut_out, flatten, insert_call, key_of, text_of
from passes.ir.folds import Fold
from passes.ir.layer import Layer
from passes.ir.spec import Spec
from passes.ir.stages import Stage
from passes.lower.unfold import Unfold

aten = torch.ops.aten
LEFT_OUT = 3
FOLD = Fold("layers", 2, LEFT_OUT)
FEW, ALL = (0, 1, 2, 6, 7), range(8)


def chain(numbers, other=None):
    """Layers x -> tanh(x * w) as calls of one body; layer `other` adds where the others multiply."""
    small = Small()
    x = small.input("x", cut((2, 3)), "batch")
    weights = [small.input(f"layers.{i}.w", cut((2, 3))) for i in numbers]
    small.inputs[1:] = [replace(item, layer=Layer("layers", i)) for i, item in zip(numbers, small.inputs[1:])]
    pieces = []
    for i, weight in zip(numbers, weights):
        combined = small.call(aten.add.Tensor if i == other else aten.mul.Tensor, x, weight)
        x = small.call(aten.tanh.default, combined)
        for node in (combined, x):
            ir.update(node, layer=Layer("layers", i))
        pieces.append((combined, x))
    program = small.program([("loss", "loss", small.call(aten.sum.default, x), Spec(()))])
    graph, env, bodies = fx.Graph(), {}, {}
    for node in program.graph.nodes:
        for number, nodes in enumerate(pieces):
            if node is nodes[-1]:
                piece = replace(cut_out(nodes, [nodes[-1]]), layer=Layer("layers", numbers[number]))
                body_graph = piece.graph(piece.positions())
                key = key_of(text_of(body_graph))
                body = bodies.setdefault(key, Body(f"body{len(bodies)}", body_graph, key, piece.positions()))
                insert_call(graph, body, piece, env)
        if not any(node in nodes for nodes in pieces):
            env[node] = graph.node_copy(node, env.__getitem__)
    return replace(program.with_graph(graph), stage=Stage.SEGMENTED), small.ctx


def value(program, *weights):
    """The result of the program on given weights."""
    flat = flatten(program)
    return fx.Interpreter(flat.module).run(torch.ones(2, 3, dtype=torch.float64), *weights)[0]


def test_it_computes_what_all_layers_do():
    folded, ctx = chain(FEW)
    unfolded, report = Unfold()(replace(folded, folds=(FOLD,)), ctx)
    expected, _ = chain(ALL)
    assert [item.name for item in unfolded.inputs] == ["x", *(f"layers.{i}.w" for i in ALL)]
    assert [item.layer for item in unfolded.inputs] == [item.layer for item in expected.inputs]
    assert report.counts == {"layers": LEFT_OUT} and not unfolded.folds
    weights = [torch.rand(2, 3, dtype=torch.float64) for _ in ALL]
    assert torch.equal(value(unfolded, *weights), value(expected, *weights))
    layers = [ir.layer(node) for node in flatten(unfolded).calls() if node.target is aten.tanh.default]
    assert layers == [Layer("layers", i) for i in ALL]


@pytest.mark.parametrize("other", [1, 6])
def test_a_neighbour_that_computes_something_else_is_named(other):
    folded, ctx = chain(FEW, other)
    with pytest.raises(ir.LayersDiffer, match="layers.2: its part"):
        Unfold()(replace(folded, folds=(FOLD,)), ctx)


def test_a_program_without_a_fold_is_refused():
    program, ctx = chain(FEW)
    with pytest.raises(ValueError):
        Unfold()(program, ctx)
