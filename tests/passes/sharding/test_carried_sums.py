"""A partial value is carried only through operators that are linear in it: by value against one device."""

from __future__ import annotations

import pytest
import torch
from oracle import compile_lockstep, trained_alike
from torch import Tensor, nn

from passes.ir import ir
from passes.ops import reshard

PLAN = {"up.weight": {"tp": 0}, "down.weight": {"tp": 1}}


class Net(nn.Module):
    """Two layers: the first gives shards, the second a partial sum; `between` computes the result from them."""

    def __init__(self, between):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False), between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self.up(x), self.down)


def scaled_maximum(wide, down):
    return down(torch.tanh(wide)) * (wide.detach().amax(-1, keepdim=True) * 2.0)


def reshaped_maximum(wide, down):
    return down(torch.tanh(wide)) * wide.detach().amax(-1).unsqueeze(-1)


def count_of_a_sum(wide, down):
    return wide.sum(-1) * torch.count_nonzero(down(torch.relu(wide)))


def rounded_quotient(wide, down):
    return wide.sum(-1, keepdim=True) * torch.div(down(torch.relu(wide)), 0.1, rounding_mode="floor")


def shifted_sum(wide, down):
    return torch.tanh(down(torch.relu(wide)) + 0.5)


BETWEEN = (scaled_maximum, reshaped_maximum, count_of_a_sum, rounded_quotient, shifted_sum)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
@pytest.mark.sample(2)
def test_what_is_not_linear_gets_whole_values(between, sequence_parallel):
    torch.manual_seed(0)
    model, batch = Net(between).double(), {"x": torch.randn(4, 3, 6, dtype=torch.float64)}

    def loss(model, batch):
        return model(batch["x"]).square().mean()

    options = {"shard": {"plan": PLAN, "sequence_parallel": sequence_parallel}, "verify": "numeric"}
    step = compile_lockstep(model, loss, batch, {"tp": 2}, {"name": "sgd"}, passes=options)
    assert step(batch, 0.0)["loss"] == pytest.approx(loss(model, batch).item(), rel=1e-12)


def test_sums_that_are_added_are_reduced_once():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.other = (nn.Linear(*s, bias=False) for s in ((6, 8), (8, 6), (8, 6)))

        def forward(self, x):
            wide = self.up(x).tanh()
            return self.down(wide) + self.other(wide)

    programs, batch = {}, {"x": torch.randn(4, 3, 6)}
    plan = {**PLAN, "other.weight": {"tp": 1}}
    compile_lockstep(Two(), lambda model, batch: model(batch["x"]).square().mean(), batch, {"tp": 2},
                     passes={"shard": {"plan": plan}}, observe=lambda program, record: programs.setdefault(record.name, program))
    reduced = [n for n in programs["shard"].calls() if n.target in (reshard.psum, reshard.reduce_scatter)]
    assert len([n for n in reduced if ir.example(n).dim() == 3]) == 1


class Summed(nn.Module):
    """A parameter that is summed where it is stored, in shards with padding in the last one."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.arange(7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * self.p.sum()


def test_padding_of_a_stored_shard_stays_what_it_is_while_its_sum_is_trained():
    generator = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(4, 3, dtype=torch.float64, generator=generator)} for _ in range(3)]
    trained_alike(Summed(), lambda model, batch: model(batch["x"]).square(), data, {"dp_shard": 2},
                  {"name": "sgd", "max_norm": None})


class OverTheBatch(nn.Module):
    """Reduces all rows to one."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).sum(0).tanh()


def test_sums_over_the_batch_are_whole_on_each_rank_of_it():
    """They are cut along the sequence only over tp, whose ranks share the tokens."""
    programs, batch = {}, {"x": torch.randn(4, 3, 6)}
    compile_lockstep(OverTheBatch(), lambda model, batch: model(batch["x"]).square().mean(), batch, {"dp_shard": 2},
                     observe=lambda program, record: programs.setdefault(record.name, program))
    forward = [n for n in programs["shard"].calls() if n.target in (reshard.psum, reshard.reduce_scatter)]
    assert [n.target for n in forward if ir.example(n).dim() == 2] == [reshard.psum]
