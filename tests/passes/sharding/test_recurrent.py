"""Recurrent networks, whole and cell by cell, train as on one device; whole ones stay one operator, sharded by rows."""

from __future__ import annotations

import pytest
import torch
from oracle import LRS, NO_DECAY, compile_lockstep, trained_alike
from sweeps import in_turn
from torch import nn

from compiler_trainer import UserError
from passes.ir import ir

MESHES = [{"dp_shard": 2}, {"tp": 2}, {"cp": 2}, {"dp_shard": 3}, {}, {"dp_shard": 2, "tp": 2}]


class Network(nn.Module):
    """Returns outputs and last states of a network along the sequence."""

    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(0)
        self.network = kind(6, 4, **options)
        self.out = nn.Linear(4 * (1 + self.network.bidirectional), 6)
        self.double()

    def forward(self, x):
        y, last = self.network(x if self.network.batch_first else x.transpose(0, 1))
        y = self.out(y) + sum(s.mean() for s in (last if isinstance(last, tuple) else (last,)))
        return y if self.network.batch_first else y.transpose(0, 1)


class Cells(nn.Module):
    """Runs one cell, step by step."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.out = kind(6, 4), nn.Linear(4, 6)
        self.double()

    def forward(self, x):
        state, outputs = None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            outputs.append(self.out(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outputs, 1)


MODELS = {
    "lstm": lambda: Network(nn.LSTM, batch_first=True),
    "lstm of two layers": lambda: Network(nn.LSTM, num_layers=2, bias=False),
    "gru both ways": lambda: Network(nn.GRU, bidirectional=True),
    "rnn": lambda: Network(nn.RNN, nonlinearity="relu", batch_first=True),
    "lstm cells": lambda: Cells(nn.LSTMCell),
    "gru cells": lambda: Cells(nn.GRUCell),
    "rnn cells": lambda: Cells(nn.RNNCell),
}


def loss(model, batch):
    return model(batch["x"]).square().mean()


def data(length=3):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, length, 6, generator=generator, dtype=torch.float64)} for _ in LRS]


@pytest.mark.parametrize(("model", "mesh"), in_turn(MODELS, MESHES), ids=str)
@pytest.mark.sample(2)
def test_it_trains_as_on_one_device(model, mesh):
    trained_alike(MODELS[model](), loss, data(), mesh, NO_DECAY)


def test_a_network_is_one_operator_until_gradients_are_traced():
    programs = {}
    compile_lockstep(MODELS["lstm"](), loss, data(20)[0], {"dp_shard": 2}, NO_DECAY,
                     observe=lambda program, record: programs.setdefault(record.name, program))  # fmt: skip
    (node,) = [n for n in programs["shard"].calls() if "lstm" in n.name and n.op == "call_function" and "getitem" not in str(n.target)]
    assert ir.value(node)[0].shape == (2, 20, 4)  # half of the rows
    assert not [n for n in programs["joint"].calls() if "lstm.input" in str(n.target)]


def test_in_fp32_it_is_written_out_as_well():
    """PyTorch would use a fused CPU kernel for all steps."""
    model, batch = MODELS["lstm"]().float(), {"x": data()[0]["x"].float()}
    step = compile_lockstep(model, loss, batch, {"dp_shard": 2}, NO_DECAY, evaluate=True)
    assert step(batch, 0.0)["loss"] == pytest.approx(loss(model, batch).item(), rel=1e-5)
    assert step.evaluate(batch) == pytest.approx(loss(model, batch).item(), rel=1e-5)


def test_dropout_between_layers_is_refused():
    with pytest.raises(UserError, match="draws random numbers"):
        compile_lockstep(Network(nn.LSTM, num_layers=2, dropout=0.5), loss, data()[0], {}, NO_DECAY)
