"""The local graph: one conversion for all users, sizes of a rank, and padding filled where an operator counts it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from compiler_trainer.capture.capture import capture
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.operators import name_of
from passes.sharding.normalize import Normalize
from passes.sharding.place import Place
from passes.sharding.shard import Shard


def sharded(model, loss, batch, mesh, plan):
    """The local program of a model."""
    program, ctx = capture(model, loss, batch, torch.device("cpu"))
    program = replace(program, mesh=Mesh.of(mesh))
    for rewrite in (Normalize(), Place(plan), Shard()):
        program, _ = rewrite(program, ctx)
    return program


def counts(program):
    return Counter(name_of(node) for node in program.calls())


class Shared(nn.Module):
    """One weight, read by several operators."""

    def __init__(self, rows=6):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(rows, 4))


def test_a_weight_is_gathered_once_for_all_its_users():
    def loss(model, batch):
        once, again = F.linear(batch["x"], model.weight), F.linear(batch["x"].tanh(), model.weight)
        return (once + again + model.weight.sum()).square().mean()

    model = Shared()
    program = sharded(model, loss, {"x": torch.rand(4, 4)}, {"dp_shard": 2}, {})
    assert counts(program)["ct::all_gather"] == 1


def test_a_weight_is_gathered_before_it_is_rearranged():
    def loss(model, batch):
        return (batch["x"] @ model.weight.t() + batch["x"] @ model.weight.view(3, 2, 4).flatten(0, 1).t()).square().mean()

    program = sharded(Shared(), loss, {"x": torch.rand(4, 4)}, {"dp_shard": 2}, {})
    assert counts(program)["ct::all_gather"] == 1


def test_sizes_among_arguments_are_those_of_a_rank():
    def loss(model, batch):
        return F.linear(batch["x"], model.weight).view(4, 3, 2).square().mean()

    program = sharded(Shared(), loss, {"x": torch.rand(4, 4)}, {"dp_shard": 2}, {})
    (reshape,) = [node for node in program.calls() if name_of(node) == "reshape"]
    assert reshape.args[1][0] == 2 and ir.example(reshape).shape == (2, 3, 2)


@pytest.mark.parametrize(("rows", "fills"), [(6, 0), (5, 1)])
def test_padding_is_filled_where_a_sum_would_count_it(rows, fills):
    def loss(model, batch):
        return model.weight.exp().sum() + batch["x"].sum()

    program = sharded(Shared(rows), loss, {"x": torch.rand(4, 4)}, {"tp": 2}, {"weight": {"tp": 0}})
    assert counts(program)["where"] >= fills and (counts(program)["where"] == 0) == (fills == 0)
