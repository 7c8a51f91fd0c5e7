"""The record of a node: frozen, shared by copies, and partly inherited by replacements."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from passes.ir import ir
from passes.ir.layer import Layer, Role
from passes.ir.record import FIELDS, BodyNode, NodeRecord, Origin, differences
from passes.ir.spec import Spec
from passes.torch_private import from_torch, to_torch

OTHER = {
    "value": torch.ones(3),
    "spec": Spec.whole((3,)),
    "stands_for": "mm",
    "phase": "backward",
    "layer": None,
    "role": Role("own", "backward", None),
    "recomputed": True,
    "checkpoint": "checkpoint.0",
    "parameter": "layers.3.w",
    "stage": 1,
    "microbatch": 2,
    "origin": Origin("model.py:41", ("layers.3",)),
    "body_nodes": (BodyNode("mm_3", NodeRecord(phase="backward")),),
}
INHERITED = {"phase", "layer", "recomputed", "checkpoint", "parameter", "stage", "microbatch", "origin"}


def same(a, b):
    return a is b


def node_of(record: NodeRecord) -> fx.Node:
    node = fx.Graph().placeholder("x")
    ir.set_record(node, record)
    return node


def test_a_node_of_the_same_origin_has_a_value_of_its_own():
    """Each field is either inherited or describes the value of the new node."""
    new, value = node_of(NodeRecord()), torch.ones(2)
    ir.set_value(new, value)
    ir.copy_origin(new, node_of(NodeRecord(**OTHER)))
    inherited = {name for name in FIELDS if getattr(ir.record(new), name) is OTHER[name]}
    assert inherited == INHERITED and ir.value(new) is value and ir.spec(new) is None


def test_a_copied_node_shares_the_record_and_a_change_leaves_the_original():
    node = node_of(NodeRecord(**OTHER))
    new = ir.copy_node(fx.Graph(), node, {})
    assert ir.record(new) is ir.record(node)
    ir.update(new, phase="forward", layer=Layer("layers", 3))
    assert differences(ir.record(new), ir.record(node), same) == ["phase", "layer"]


@pytest.mark.parametrize("name", FIELDS)
def test_a_difference_is_named_by_its_field(name):
    assert differences(NodeRecord(**{name: OTHER[name]}), NodeRecord(), same) == [name]


def test_a_difference_of_nodes_in_a_body_counts():
    a, b = (NodeRecord(body_nodes=(BodyNode("mm", NodeRecord(stage=stage)),)) for stage in (0, 1))
    assert differences(a, b, same) == ["body_nodes"] and differences(a, a, same) == []


def test_the_door_to_pytorch_reads_what_its_tracer_wrote():
    node, value = node_of(NodeRecord(stage=1)), torch.ones(2)
    stack = {"a": ("", None), "b": ("model.wq", None)}
    to_torch(node, val=value, stack_trace="frames", nn_module_stack=stack, custom={"mark": 1})
    assert from_torch(node) == (value, "frames", ("", "model.wq"), {"mark": 1}) and ir.value(node) is None
    ir.set_record(node, ir.record(node))
    assert from_torch(node) == (None, "", (), {}) and ir.pipeline_stage(node) == 1
