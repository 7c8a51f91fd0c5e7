"""Every node of the backward records the forward node that it differentiates; otherwise the backward is refused."""

from __future__ import annotations

import collections
import gc
import weakref

import joint_programs
import pytest
import torch
from small_programs import Small
from torch import fx

from passes.autograd import joint
from passes.ir import ir
from passes.ir.spec import Spec

aten = torch.ops.aten


@pytest.fixture(params=[(), (("dp_shard", 2), ("tp", 2))], ids=str)
def program(request) -> ir.Program:
    return joint_programs.joint(request.param)[0]


def modules(program: ir.Program, phase: str) -> set[str]:
    return {ir.module_path(n) for n in program.calls() if ir.phase(n) == phase}


def test_the_backward_passes_through_the_modules_of_the_forward(program):
    assert modules(program, "backward") == modules(program, "forward")
    assert {"blocks.0.norm", "blocks.1.up", "embed", "head"} <= modules(program, "backward")
    assert all(ir.source(n) for n in program.calls() if ir.phase(n) == "backward")


def test_each_weight_gradient_comes_from_the_module_of_its_weight(program):
    for output, node in zip(program.outputs, program.results(), strict=True):
        if output.kind == "gradient":
            assert output.name.startswith(ir.module_path(node) + "."), f"{output.name} is %{node.name}"


def test_a_sum_of_gradients_comes_from_a_module_that_yields_a_term(program):
    layer = lambda node: ".".join(ir.module_path(node).split(".")[:2])  # noqa: E731
    sums = [n for n in program.calls() if n.target is aten.add.Tensor and ir.phase(n) == "backward"]
    by_layer = collections.Counter(map(layer, sums))
    assert by_layer["blocks.0"] and by_layer["blocks.1"]
    for node in sums:
        assert layer(node) in {layer(term) for term in node.all_input_nodes}, node.name


def test_what_the_forward_computes_behind_the_loss_stays_forward():
    small = Small()
    weight = small.input("w", Spec.whole((3,)))
    loss = small.call(aten.sum.default, small.call(aten.mul.Tensor, weight, weight), spec=Spec.whole(()))
    metric = small.call(aten.neg.default, loss, spec=Spec.whole(()))
    program = small.program([("loss", "loss", loss, Spec.whole(())), ("metric", "negated", metric, Spec.whole(()))])
    result, report = joint.Joint()(program, small.ctx)
    phases = {n.target: ir.phase(n) for n in result.calls()}
    assert phases[aten.neg.default] == "forward" and phases[aten.ones_like.default] == "backward"
    assert report.counts["without origin"] == 0


def test_a_backward_without_origins_is_refused(monkeypatch):
    monkeypatch.setattr(joint, "enter", lambda *_: None)
    with pytest.raises(ir.CompileError, match=r"joint: %\w+ and 128 other of 130 nodes of the backward are linked to no"):
        joint_programs.joint.__wrapped__()


def test_a_few_nodes_without_an_origin_are_noted():
    node = fx.Graph().call_function(aten.zeros.default, ([2],))
    assert joint.report_lost([node], 20) == ("%zeros_default: linked to no node of the forward",)
    with pytest.raises(ir.CompileError, match="0 other of 19"):
        joint.report_lost([node], 19)


def test_autograd_keeps_nothing_of_the_trace_alive(monkeypatch):
    references = []

    class Watched(joint.Origins):
        def __init__(self, module: fx.GraphModule):
            super().__init__(module)
            references.append(weakref.ref(self))

    monkeypatch.setattr(joint, "Origins", Watched)
    joint_programs.joint.__wrapped__()
    gc.collect()
    assert [ref() for ref in references] == [None]
