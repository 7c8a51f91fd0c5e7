"""Sequences that are parameters: stored over `cp`, and used with those of tokens, which `cp` shards otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_cases import grids
from oracle import compile_lockstep, trained_alike
from packed_models import SIZE, Packed, batches, loss_of
from sweeps import in_turn
from torch import nn
from torch.autograd import Function

from passes.ir.ir import CompileError
from passes.rules import Rule
from passes.sharding.shard import Shard

SGD = {"name": "sgd"}


class Centered(Function):
    """A function whose bodies add up along the sequence, and leave nonzero padding."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x - x.mean()).cos()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * g.abs() + 0.01 * x - g.mean()


class Positions(nn.Module):
    """Learned positions, passed through `fn`: the full table, or looked up."""

    def __init__(self, fn, looked_up):
        super().__init__()
        self.fn, self.looked_up = fn, looked_up
        self.weight = nn.Parameter(torch.randn(SIZE, 16, dtype=torch.float64))

    def forward(self, row):
        return self.fn(F.embedding(row, self.weight) if self.looked_up else self.weight)


class Latents(Packed):
    """A model with attention among parameters only, whose results are added to the tokens'."""

    is_masked = True

    def forward(self, tokens, ids):
        i, j = grids(SIZE)
        mask = ((i >= j) & (i - j < 9))[None, None] if self.is_masked else None
        x = self.rows.weight.view(1, SIZE, 4, 4).transpose(1, 2)
        y = F.scaled_dot_product_attention(x, x.cos(), x.sin(), mask)
        return self.head(y.transpose(1, 2).flatten(2) + self.tokens(tokens))


def learned(fn, looked_up=False):
    torch.manual_seed(0)
    model = Packed(causal=False, learned=True)
    model.rows = Positions(fn, looked_up)
    return model


def latents():
    torch.manual_seed(0)
    return Latents(causal=False, learned=True)


def check(model, mesh, rows, balance):
    passes = {"context": {"load_balance": balance} | ({"block": 2} if balance == "blocks" else {})}
    trained_alike(model, loss_of, batches(rows), mesh, SGD, passes=passes, lower={"backend": "eager"})


FUNCTIONS = {"themselves": lambda x: x, "cosines": torch.cos, "given gradients": Centered.apply}
MESHES = [  # (mesh, rows)
    ({"cp": 2}, 3),
    ({"cp": 3, "dp_replicate": 2}, 1),
    ({"cp": 2, "tp": 2}, 2),
    ({"cp": 2, "dp_shard": 3}, 4),
    ({"cp": 2, "dp_replicate": 2}, 3),
]


@pytest.mark.parametrize(("where", "balance", "kind", "looked_up"),
                         in_turn(MESHES, ("none", "head_tail", "blocks"), FUNCTIONS, (False, True)), ids=str)
@pytest.mark.sample(2)
def test_positions_beside_tokens(where, balance, kind, looked_up):
    check(learned(FUNCTIONS[kind], looked_up), *where, balance)


@pytest.mark.parametrize("balance", ["none", "head_tail"])
def test_attention_among_parameters(balance):
    check(latents(), {"cp": 2}, 3, balance)
    model = latents()
    model.is_masked = False
    check(model, {"cp": 2}, 3, balance)


def test_a_sequence_as_it_is_stored_is_heard_in_attention(monkeypatch):
    """Check that attention does not take the `fsdp` shards of a parameter for `cp` shards of a sequence.

    A mask, of which each rank makes a share of `cp`, would tell it.
    """
    decided = Shard.__call__

    def fooled(self, program, ctx):
        with monkeypatch.context() as only_here:
            only_here.setattr(Rule, "may_lie", lambda *_: True)
            return decided(self, program, ctx)

    monkeypatch.setattr(Shard, "__call__", fooled)
    with pytest.raises(CompileError, match="s is sharded over fsdp, in another order than over cp"):
        model = latents()
        model.is_masked = False
        compile_lockstep(model, loss_of, batches(3)[0], {"cp": 2}, SGD)
