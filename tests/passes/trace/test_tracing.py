"""Functions become graphs: composite operators stay, writes become values, and unknown tensors are refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from passes.ir import ir
from passes.torch_private import FakeTensorMode
from passes.trace.trace import UnknownTensor, trace

aten = torch.ops.aten


@pytest.fixture
def ctx():
    return ir.Context(FakeTensorMode())


def traced(fn, *shapes, ctx):
    """The graph of a function of fake tensors, and the operators that it calls."""
    with ctx.fake_mode:
        values = [torch.empty(shape) for shape in shapes]
    graph = trace(fn, values, ctx)
    graph.lint()
    return graph, [node.target for node in graph.nodes if node.op == "call_function"]


def run(graph, *values):
    return fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run(*values)


def test_composite_operators_are_one_node(ctx):
    graph, targets = traced(lambda x, w: F.linear(x, w).relu(), (2, 3), (4, 3), ctx=ctx)
    assert targets == [aten.linear.default, aten.relu.default]
    assert [ir.example(node).shape for node in graph.nodes if node.op != "output"] == [(2, 3), (4, 3), (2, 4), (2, 4)]


def test_a_write_into_a_value_of_the_function_is_a_new_value(ctx):
    def fn(x):
        y = x * 2
        y[0] += 1
        return y

    graph, targets = traced(fn, (3, 2), ctx=ctx)
    assert not any(target._schema.is_mutable for target in targets)
    x = torch.rand(3, 2)
    assert torch.equal(run(graph, x), fn(x))


def test_a_write_into_an_argument_comes_last(ctx):
    def fn(x, y):
        x.add_(y)
        return x * y

    graph, targets = traced(fn, (3,), (3,), ctx=ctx)
    assert targets[-1] is aten.copy_.default and targets.count(aten.copy_.default) == 1
    x, y = torch.rand(3), torch.rand(3)
    expected = (x + y) * y
    written = x.clone()
    assert torch.equal(run(graph, written, y), expected) and torch.equal(written, x + y)


def test_parts_of_a_result_are_taken_from_it(ctx):
    graph, _ = traced(lambda x: x.max(1), (2, 3), ctx=ctx)
    x = torch.rand(2, 3)
    values, indices = run(graph, x)
    assert torch.equal(values, x.max(1).values) and torch.equal(indices, x.max(1).indices)


def test_a_number_that_a_function_holds_is_in_the_graph(ctx):
    graph, targets = traced(lambda x: x * torch.tensor(3.0), (2,), ctx=ctx)
    assert aten.full.default in targets and torch.equal(run(graph, torch.ones(2)), torch.full((2,), 3.0))


def test_a_tensor_that_is_not_an_argument_is_refused(ctx):
    with ctx.fake_mode:
        captured = torch.rand(2)
    with pytest.raises(UnknownTensor, match=r"a tensor \(torch.float32 \[2\]\)"):
        traced(lambda x: x * captured, (2,), ctx=ctx)
