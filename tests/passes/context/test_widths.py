"""Heads whose values are narrower or wider than keys: flash attention still applies, so no scores are in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_same, compile_lockstep, train_plainly, train_step
from packed_models import batches
from sweeps import in_turn
from torch import Tensor, nn

from passes.ir import ir
from passes.ir.ir import example

SIZE, HEADS, KEYS = 21, 4, 6


class Heads(nn.Module):
    """A model with an embedding, one attention with values of their own width, and a head."""

    def __init__(self, values: int, scale: float | None):
        super().__init__()
        self.scale = scale
        self.tokens = nn.Embedding(11, 16, dtype=torch.float64)
        self.qk, self.v = (nn.Linear(16, HEADS * n, dtype=torch.float64) for n in (2 * KEYS, values))
        self.head = nn.Linear(HEADS * values, 11, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        q, k = self.qk(x).view(*tokens.shape, 2, HEADS, KEYS).permute(2, 0, 3, 1, 4)
        v = self.v(x).view(*tokens.shape, HEADS, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.head(y.transpose(1, 2).flatten(2))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


RUNS = (({"dp_shard": 2}, "auto"), ({"tp": 2}, "auto"), ({"cp": 2}, "ring"), ({"cp": 2}, "ulysses"), ({"cp": 2}, "all_gather"))


@pytest.mark.parametrize(("run", "values", "scale"), in_turn(RUNS, [4, 9], [None, 0.3]), ids=str)
@pytest.mark.sample(2)
def test_a_step_is_that_of_one_device_without_scores_in_memory(run, values, scale):
    mesh, method = run
    torch.manual_seed(0)
    model, data = Heads(values, scale), batches()
    data = [{"tokens": batch["tokens"], "labels": batch["labels"]} for batch in data]
    plain = Heads(values, scale)
    plain.load_state_dict(model.state_dict())
    step = compile_lockstep(model, loss_of, data[0], mesh, passes={"context": {"method": method}})
    result = train_step(step, data)
    metrics, state = train_plainly(plain, loss_of, data)
    for ours, theirs in zip(result, metrics, strict=True):
        assert_same(ours, theirs, 1e-10)
    assert_same(step.state_dict(), state, 1e-10)
    if method != "all_gather":  # causal by a mask
        nodes = step.train["step"].program.calls()
        assert any("flash_attention" in str(node.target) for node in nodes)
        outputs = [example(node) for node in nodes if ir.is_tensor(node)]
        assert not [x.shape for x in outputs if x.shape[-2:] == (SIZE, SIZE)]
