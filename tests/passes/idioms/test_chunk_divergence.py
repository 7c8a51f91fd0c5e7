"""The divergence of two heads in chunks of tokens: PyTorch's values and gradients, whatever ranks share."""

from __future__ import annotations

import pytest
import torch
from rule_harness import capture as capture_function
from rule_harness import check, sharded
from torch import nn
from verified import apply

from compiler_trainer.capture.capture import capture
from passes.idioms.chunk_loss import ChunkLoss
from passes.ir.mesh import Mesh
from passes.memory.chunked_divergence import linear_divergences
from passes.rules.losses import LINEAR_DIVERGENCES

HEADS = (torch.randn(8, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64),
         torch.randint(-3, 4, (8, 3)), torch.randint(-3, 4, (7, 3)))  # whole numbers have no gradients, as a teacher
STEPS = ["div 2.0", "tanh", "mul 3.0"], ["div 0.5"]


def forward(hidden, weight, theirs, their_weight):
    return linear_divergences(hidden, weight, theirs.double(), their_weight.double(), *STEPS, True, 3)


def reverse(hidden, weight, theirs, their_weight):
    return linear_divergences(hidden, weight, theirs.double(), their_weight.double(), *STEPS, False, 3)


@pytest.mark.parametrize(("ranks", "fill"), [(2, 0.0), (3, None), (4, None)])
@pytest.mark.parametrize("weights", [(), (1, 3)])
@pytest.mark.parametrize("taken", [forward, reverse])
@pytest.mark.sample(2)
def test_the_rule_by_value(ranks, fill, weights, taken):
    """Shard each dim of each operand, evenly and unevenly, with padding of zeros and of garbage."""
    for axis in ("tp", "dp_shard"):
        function = capture_function(taken, HEADS, Mesh.of({axis: ranks}), weights)
        for i, dim in [(i, dim) for i in range(4) for dim in range(2)]:
            check(function, {i: sharded(HEADS[i].shape, dim, axis, fill)})
    both = {i: sharded(HEADS[i].shape, 0, "tp", fill) for i in (1, 3)}
    check(capture_function(taken, HEADS, Mesh.of({"tp": ranks}), weights), both)


class Pair(nn.Module):
    """Two embeddings with heads, the second one frozen unless `both`."""

    def __init__(self, both=False, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.ours = nn.Sequential(nn.Embedding(61, 8), nn.Linear(8, 61, bias=bias))
        self.theirs = nn.Sequential(nn.Embedding(61, 5), nn.Linear(5, 61, bias=False)).requires_grad_(both)


def loss(model, batch):
    p, q = (part(batch["tokens"]).log_softmax(-1) for part in (model.ours, model.theirs))
    return (q.exp() * (q - p)).sum(-1).mean()


BATCH = {"tokens": torch.arange(24).view(4, 6)}


def test_both_heads_are_gone_and_the_rest_stays():
    program, ctx = capture(Pair(), loss, BATCH, torch.device("cpu"))
    result, report = apply([ChunkLoss(chunks=3)], program, ctx)
    assert [str(n.target) for n in result.calls() if "linear" in str(n.target)] == [f"{LINEAR_DIVERGENCES.replace('::', '.')}.default"]
    assert report.counts["losses"] == 1 and "in 3 chunks" in report.notes[0]


@pytest.mark.parametrize(
    "options, reason",
    [({"both": True}, "not one of the two distributions is trained"), ({"bias": True}, "%linear has a bias")],
)
def test_a_pair_that_does_not_fit_is_reported(options, reason):
    program, ctx = capture(Pair(**options), loss, BATCH, torch.device("cpu"))
    result, report = apply([ChunkLoss(logits_mib=1e-3)], program, ctx)
    assert result is program and len(report.notes) == report.effects[0].total == 1 and reason in report.notes[0]
