"""Differences between captured program and model are reported by name: lost, added or other computations."""

from __future__ import annotations

import re

import pytest
import torch
from oracle import batches, llama, llama_loss
from torch import nn

from compiler_trainer.capture import capture as capturing
from compiler_trainer.capture.compare import captured_difference
from passes.ir import ir


class Net(nn.Module):
    """Three layers, optionally with dropout between them; the last is used twice."""

    def __init__(self, p: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.drop, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(p), nn.Linear(4, 4)

    def forward(self, x):
        y = self.drop(torch.tanh(self.a(x)))
        with torch.no_grad():
            scale = self.unused(y).mean()
        return self.b(self.b(y) * scale)


BATCH = {"x": torch.randn(3, 4, generator=torch.Generator().manual_seed(1))}


def loss(model, batch):
    return model(batch["x"]).square().mean()


def cut(graph, trained):
    """Make autograd lose the first tanh."""
    write(graph, trained)
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
    with graph.inserting_after(node):
        lost = graph.call_function(torch.ops.aten.detach.default, (node,))
    ir.set_record(lost, ir.record(node))
    node.replace_all_uses_with(lost, lambda user: user is not lost)


write = capturing.write_gradients


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("values", [True, False])
def test_a_model_is_captured_as_it_is(p, values):
    assert captured_difference(Net(p), loss, BATCH, values=values) == ""


@pytest.mark.parametrize(("p", "values", "says"), [
    (0.0, True, "gradient of a.weight differs by"),
    (0.0, False, r"no gradient reaches a.bias \(2 parameters\), though the model has one"),
    (0.5, True, r"no gradient reaches a.bias \(2 parameters\)"),
], ids=["values", "structure", "random"])
def test_a_gradient_that_is_cut_is_named(monkeypatch, p, values, says):
    monkeypatch.setattr(capturing, "write_gradients", cut)
    result = captured_difference(Net(p), loss, BATCH, values=values)
    assert re.match(says, result), result


def test_a_gradient_that_the_model_does_not_have_is_named(monkeypatch):
    def follow_all(graph, trained):
        for node in graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled):
            graph.erase_node(node)

    monkeypatch.setattr(capturing, "write_gradients", follow_all)
    assert captured_difference(Net(), loss, BATCH, values=False).startswith("a gradient reaches unused.bias")
    assert captured_difference(Net(), loss, BATCH).startswith("gradient of a.weight differs")


def test_a_decoder_is_captured_as_it_is():
    assert captured_difference(llama(dtype=torch.float32), llama_loss, batches()[0]) == ""
