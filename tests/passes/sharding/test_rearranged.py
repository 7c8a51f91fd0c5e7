"""A rearranged weight is complete at its uses, even if it was computed as a sum."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import assert_same, compile_lockstep, trained_alike
from rearranged import FORMS, MESH, ROWS, example, loss
from torch import Tensor, nn

from passes.ir import ir
from passes.sharding import partition
from passes.sharding.partition import Partitioner


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sample(2)
def test_loss_and_gradients_are_those_of_one_device(form, rows):
    model, batch = example(form, rows)
    alone = copy.deepcopy(model)
    wanted = loss(alone, batch)
    wanted.backward()
    step = compile_lockstep(model, loss, batch, MESH, {"name": "sgd", "max_norm": None})
    assert step(batch, lr=1.0)["loss"] == pytest.approx(wanted.item(), rel=1e-12)
    moved = {name: (p - p.grad).detach() for name, p in alone.named_parameters()}
    assert_same({name: step.state_dict()[name] for name in moved}, moved, 1e-12)


def keep_the_terms(self: Partitioner, node, wanted):
    """Run an earlier, faulty `hoist`: the operand's sum is not reduced, but the result is called complete."""
    decision = self.plan.decisions.get(node)
    if decision is None or not decision.rule.moves or wanted.partial:
        return None
    dims = partition.operand_dims(decision.rule, wanted, self.program.mesh)
    if dims is None:
        return None
    (operand,) = partition.tensor_operands(node)
    below = partition.replace(self.plan.current(operand), dims=dims, replicate=wanted.replicate)
    new = self.emit_on(node, decision, [self.version(operand, below, node.name)], [wanted])
    ir.set_spec(new, wanted)
    ir.update(new, stands_for=node.name)
    return new


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.sample(2)
def test_the_verifier_refuses_a_sum_that_is_called_complete(form, rows, monkeypatch):
    monkeypatch.setattr(Partitioner, "hoist", keep_the_terms)
    model, batch = example(form, rows)
    with pytest.raises(ir.CompileError, match=r"its rule gives .* sum\(dp_shard\) for .* sum\(dp_shard\)"):
        compile_lockstep(model, loss, batch, MESH)


def test_without_the_verifier_that_sum_is_taken_for_complete(monkeypatch):
    monkeypatch.setattr(Partitioner, "hoist", keep_the_terms)
    model, batch = example("t", "of the second rank")
    step = compile_lockstep(model, loss, batch, MESH, passes={"verify": "none"})
    assert abs(step(batch)["loss"] - loss(model, batch).item()) > 0.1


class Turned(nn.Module):
    """Heads whose bias is stored by entry and head, but read by head and entry: the dims share no factor."""

    def __init__(self, *stored: int):
        super().__init__()
        self.up, self.down = nn.Linear(5, 24), nn.Linear(24, 5)
        self.bias = nn.Parameter(torch.randn(*stored))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (4, 6)) * self.bias.view(4, 6)
        return self.down(heads.flatten(-2))


@pytest.mark.parametrize("stored", [(6, 4), (8, 3), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "tp": 3}], ids=str)
@pytest.mark.sample(2)
def test_a_weight_is_read_by_dims_that_share_no_factor_with_its_own(stored, mesh):
    torch.manual_seed(0)
    batches = [{"x": torch.randn(3, 2, 5).double()} for _ in range(3)]
    trained_alike(Turned(*stored).double(), lambda model, batch: model(batch["x"]).square().mean(), batches, mesh)
