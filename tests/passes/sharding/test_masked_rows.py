"""The softmax of a padded row, all of whose scores may be masked, must not be NaN."""

from __future__ import annotations

import pytest
import torch
from oracle import compile_lockstep
from torch import Tensor, nn
from torch.nn import functional as F

F64 = torch.float64
ZERO, MIN, INFINITE = torch.tensor(0.0, dtype=F64), torch.finfo(F64).min, float("-inf")
MASKED = {
    "filled with infinity": lambda scores, seen: scores.masked_fill(~seen, INFINITE),
    "chosen or infinity": lambda scores, seen: torch.where(seen, scores, INFINITE),
    "an infinity added": lambda scores, seen: scores + torch.zeros_like(scores).masked_fill(~seen, INFINITE),
    "the least number added": lambda scores, seen: (scores + torch.where(seen, ZERO, MIN)).float(),
    "times the least number": lambda scores, seen: (scores + (1.0 - seen.to(F64)) * MIN).float(),
    "the least number twice": lambda scores, seen: scores + 2 * torch.where(seen, ZERO, MIN),
    "a tensor of least numbers": lambda scores, seen: (
        scores + torch.where(seen.expand_as(scores), torch.zeros_like(scores), torch.full_like(scores, MIN))
    ).float(),
    "the lesser of two": lambda scores, seen: torch.minimum(scores, torch.where(seen, 9.0, ZERO + MIN)).float(),
}


class Masked(nn.Module):
    """An attention that ignores token 0, the padding token."""

    def __init__(self, how: str):
        super().__init__()
        self.how = how
        self.embed, self.q, self.k, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        scores = MASKED[self.how](self.q(x) @ self.k(x).mT, (tokens != 0)[:, None, :])
        return self.head(scores.softmax(-1).to(x.dtype) @ x)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("how", MASKED)
def test_rows_of_padding_have_no_gradient(how):
    torch.manual_seed(0)
    model = Masked(how).double()
    batch = {name: torch.randint(1, 11, (3, 5)) for name in ("tokens", "labels")}
    loss = loss_of(model, batch)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    metrics = compile_lockstep(model, loss_of, batch, {"dp_shard": 2})(batch)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-10)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), abs=1e-6)  # some models compute softmax in fp32
