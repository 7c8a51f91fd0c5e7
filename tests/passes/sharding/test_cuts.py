"""Values of positions alone, such as masks of pairs of tokens, are computed in shares, as those that read them need."""

from __future__ import annotations

import pytest
import torch
from oracle import compile_lockstep, trained_alike
from torch import Tensor, nn
from torch.nn import functional as F

from passes.ir import ir

TOKENS = 19  # no other dim has this size
READ = {
    "by query": lambda first: first,
    "by query and whole": lambda first: first + first.cumsum(0).flip(0) % 5,
    "by query and in part": lambda first: first + first[:7].sum(),
}


class Windowed(nn.Module):
    """Tokens scaled by the first of the positions that each sees, which a mask of pairs gives."""

    def __init__(self, read: str):
        super().__init__()
        self.read, self.embed, self.head = READ[read], nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1])
        sees = (at[:, None] >= at) & (at[:, None] - at < 4)
        first = torch.where(sees, at, tokens.shape[1]).amin(1)
        return self.head(self.embed(tokens) * self.read(first)[:, None])


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 3, "dp_shard": 2}], ids=str)
@pytest.mark.parametrize("read", READ)
def test_no_rank_holds_a_mask_of_all_pairs(read, mesh):
    torch.manual_seed(3)
    model = Windowed(read).double()
    data = [{name: torch.randint(11, (2, TOKENS)) for name in ("tokens", "labels")} for _ in range(3)]
    for compiled in compile_lockstep(model, loss_of, data[0], mesh).train.values():
        values = {node: ir.value(node) for node in compiled.program.calls()}
        pairs = [node for node, value in values.items() if isinstance(value, Tensor) and value.shape.count(TOKENS) > 1]
        assert not pairs, [f"%{node.name} {ir.source(node)}" for node in pairs]
    trained_alike(model, loss_of, data, mesh)
