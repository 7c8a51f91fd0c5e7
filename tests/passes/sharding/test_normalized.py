"""Operators that `normalize` rewrites: two updates equal plain PyTorch's, on meshes with uneven sizes."""

from __future__ import annotations

import pytest
import torch
from oracle import NO_DECAY, trained_alike
from torch import nn

from compiler_trainer.config.errors import UserError
from passes.sharding import normalize

MESHES = [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}]
every_mesh = pytest.mark.parametrize("mesh", MESHES, ids=str)


class Between(nn.Module):
    """Two linear layers with a function between them; 5 rows of [7, 6]."""

    def __init__(self, function, width: int = 6):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.function = nn.Linear(6, 6), nn.Linear(width, 3), function

    def forward(self, x):
        return self.down(self.function(torch.tanh(self.up(x))))


def data(*shape: int):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(5, *shape, generator=generator, dtype=torch.float64)} for _ in range(3)]


def loss(model, batch):
    return (model(batch["x"]) - 0.3).square().mean()


def alike(function, mesh, width: int = 6):
    return trained_alike(Between(function, width).double(), loss, data(7, 6), mesh, NO_DECAY)


@every_mesh
@pytest.mark.sample(2)
def test_what_is_joined_to_an_empty_tensor_of_one_dim(mesh):
    alike(lambda x: torch.cat([x.new_zeros(0), x], -2), mesh)
    alike(lambda x: torch.cat([x, x.new_zeros(0), x.exp()], -1), mesh, 12)


@every_mesh
@pytest.mark.sample(1)
def test_parts_of_no_entries(mesh):
    alike(lambda x: torch.cat([x[..., :0].exp(), x, x[..., 6:]], -1), mesh)
    alike(lambda x: x + x[:, :, 6:].flatten(1).sum(-1)[:, None, None] + x[:, :0].sum(1, keepdim=True), mesh)
    alike(lambda x: torch.cat([part * 2 for part in x.split([2, 0, 4], -1)], -1), mesh)


def own_rows(x, ids):
    return x[torch.arange(x.shape[0]), ids]


def padded(x, mask):
    """Apply attention with a mask that is looked up by each row's number."""
    rows, at = torch.arange(x.shape[0])[:, None, None, None], torch.arange(x.shape[1])
    visible = mask[rows, at[None, None, None, :]] & (at[:, None] >= at)
    return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], visible)[:, 0]


@pytest.mark.parametrize("mesh", [*MESHES, {"cp": 2}, {"dp_shard": 2, "cp": 2}], ids=str)
@pytest.mark.parametrize("look_up", ["an entry", "entries", "from the end", "a mask"])
@pytest.mark.sample(4)
def test_each_row_looks_up_its_own(look_up, mesh):
    def function(x, ids):
        if look_up == "a mask":
            return padded(x, ids > 2)
        if look_up == "entries":
            return x[torch.arange(5)[:, None], ids[:, :3]].exp()
        return own_rows(x, ids[:, 0] - 7 * (look_up == "from the end")) * x.new_ones(()).cos()

    def with_ids(model, batch):
        return (model.down(function(torch.tanh(model.up(batch["x"])), batch["ids"])) - 0.3).square().mean()

    generator = torch.Generator().manual_seed(2)
    batches = [{**batch, "ids": torch.randint(0, 7, (5, 7), generator=generator).sort(-1, descending=True)[0]} for batch in data(7, 6)]
    step = trained_alike(Between(None).double(), with_ids, batches, mesh, NO_DECAY)
    changes = [c for p in step.report["passes"] for c in p["report"]["reshards"]]
    assert not any("@dp_shard" in c["before"] and "dp_shard" not in c["after"] and "sum(" not in c["before"] for c in changes)


def pooled_in_place(x):
    """Return the mean of each row's entries, in the layout of PyTorch's pooling."""
    return x.mean((1, 2)).view(5, 1, 1, 1).as_strided((5, 1, 1, 1), (1, 7, 1, 1)) * x.unsqueeze(1)


def windows(x):
    """Return three neighbours of each position, overlapping."""
    return x.contiguous().as_strided((5, 5, 3, 6), (42, 6, 6, 1)).sum(2)


@every_mesh
@pytest.mark.parametrize("function", [
    pooled_in_place, windows, lambda x: x.transpose(0, 1).as_strided((7, 6, 4), (6, 1, 42), 42).transpose(1, 2),
    lambda x: x.reshape(-1)[6:].as_strided((3, 6), (6, 1), 6).sum(0) + x,  # an offset counts from the start of memory
    lambda x: x.reshape(-1)[6:].as_strided((3, 6), (6, 1)).sum(0) + x,
    lambda x: x.contiguous()[:, :3].as_strided((5, 2, 6), (42, 6, 1)).sum(1, keepdim=True) + x,
])  # fmt: skip
@pytest.mark.sample(2)
def test_entries_by_their_place_in_memory(function, mesh):
    alike(function, mesh)


@every_mesh
@pytest.mark.sample(2)
def test_what_is_repeated_lies_in_a_row_and_can_be_viewed(mesh):
    alike(lambda x: x * x[:1].transpose(1, 2).repeat(5, 1, 1).view(30, 7).view(5, 6, 7).transpose(1, 2), mesh)


LEARNED = torch.linspace(-1, 1, 24, dtype=torch.float64).view(1, 1, 4, 6)


@every_mesh
@pytest.mark.sample(2)
def test_attention_broadcasts_its_operands_over_the_batch(mesh):
    """Check learned queries, the same for all rows, and keys that all rows share."""
    attend = nn.functional.scaled_dot_product_attention
    alike(lambda x: attend(LEARNED * 2, x[:, None], x[:, None].exp())[:, 0], mesh)
    alike(lambda x: attend(x[:, None], LEARNED, LEARNED.cos())[:, 0], mesh)


def test_entries_between_those_of_a_view_are_refused():
    """Check strides that lead into the gaps of a view, to whose entries PyTorch gives no gradient."""
    with pytest.raises(UserError, match="as_strided reads entries of memory that are not those of its operand; use slices"):
        alike(lambda x: x.contiguous()[:, :3].as_strided((5, 2, 6), (18, 6, 1)).sum(1, keepdim=True) + x, {})


ZERO = torch.tensor(0)
OF_ONE_ENTRY = {
    "cumsum": lambda s: s.cumsum(0), "cumprod": lambda s: s.cumprod(0), "cummax": lambda s: s.cummax(0).values,
    "softmax": lambda s: s * s.softmax(-1), "sort": lambda s: s.sort(0).values, "topk": lambda s: s.topk(1, 0).values,
    "flip": lambda s: s.flip(0), "gather": lambda s: s.gather(0, ZERO), "scatter": lambda s: s + s.scatter(0, ZERO, 2.0),
    "index_select": lambda s: s.index_select(0, ZERO.view(1)), "mean": lambda s: s.mean(0),
    "transpose": lambda s: s.transpose(0, -1).transpose(0, -1), "logcumsumexp": lambda s: s.logcumsumexp(0),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ONE_ENTRY)
@pytest.mark.sample(4)
def test_dims_of_tensors_without_dims(name):
    alike(lambda x: x * (1 + 0.1 * OF_ONE_ENTRY[name](x.mean())), {"dp_shard": 2})


class Dots(nn.Module):
    """Matmuls of vectors, whose results have no dims."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.vector = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x):
        y, v = self.layer(x), self.vector
        return y * (y.mean((0, 1)) @ v) + y * (v @ v) + y * nn.functional.linear(v, v, v.sum())


@every_mesh
@pytest.mark.sample(1)
def test_matmuls_of_vectors(mesh):
    trained_alike(Dots().double(), loss, data(7, 6), mesh, NO_DECAY)


def test_a_second_call_of_an_operator_that_is_written_by_itself(monkeypatch):
    """Check that all calls are rewritten if the first one's definition calls the operator again."""
    monkeypatch.setitem(normalize.REPLACED, "sin", lambda x: torch.sin(x + 0.0))
    step = alike(lambda x: torch.sin(torch.sin(x) + 1), {})
    counts = next(p["report"]["counts"] for p in step.report["passes"] if p["name"] == "normalize")
    assert counts["sin"] == 2
