"""Towers: ranks of tp share the images of a batch, as one device computes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import EXACT, batches, compile_lockstep, llama, llama_loss, trained_alike
from torch import Tensor, nn

from compiler_trainer import UserError, compile_step
from compiler_trainer.capture.capture import capture
from passes.ir.mesh import Mesh
from passes.sharding.place import place_batch
from passes.sharding.towers import Tower, dim_to_share, tower_of
from tests.nightly.models import judge
from tests.nightly.models.zoo import grids, vision

SHARED = {"shard": {"tower": "data"}}
WIDTH, HEADS, CPU = 12, 4, torch.device("cpu")


class Block(nn.Module):
    """Attention within a sequence, and a layer of two matmuls."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Seeing(nn.Module):
    """A tower of patches, text, and a norm that both use; the mean feature of a sample is added to its tokens."""

    def __init__(self):
        super().__init__()
        self.patches, self.tower, self.places = nn.Linear(6, WIDTH), Block(), nn.Parameter(torch.randn(8, WIDTH))
        self.table, self.text, self.both, self.head = nn.Embedding(30, WIDTH), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 30)

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        seen = self.both(self.tower(self.patches(patches) + self.places))
        return self.head(self.text(self.both(self.table(tokens)) + seen.mean(1, keepdim=True)))


def model() -> Seeing:
    torch.manual_seed(0)
    return Seeing().double()


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy over tokens."""
    return F.cross_entropy(module(batch["tokens"], batch["patches"]).flatten(0, 1), batch["labels"].flatten())


def data(rows: int) -> list[dict[str, Tensor]]:
    """Return batches of five tokens and eight patches a sample."""
    generator = torch.Generator().manual_seed(1)
    return [{"tokens": torch.randint(0, 30, (rows, 5), generator=generator),
             "labels": torch.randint(0, 30, (rows, 5), generator=generator),
             "patches": torch.randn(rows, 8, 6, generator=generator, dtype=torch.float64)} for _ in range(3)]


def placed(step) -> dict[str, str]:
    """Return the placements of inputs by name."""
    (report,) = [record["report"] for record in step.report["passes"] if record["name"] == "place"]
    return dict(note.split(": ", 1) for note in report["notes"])


def test_a_tower_has_the_weights_that_images_alone_use():
    program, _ = capture(model(), loss, data(2)[0], CPU)
    tower = tower_of(program)
    assert tower.entries == {"patches"}
    assert {name.split(".")[0] for name in tower.parameters} == {"patches", "tower", "places"}  # not `both`


def test_a_model_of_tokens_or_of_images_alone_has_none():
    without = [{name: entry for name, entry in batch.items() if name != "patches"} for batch in data(2)]
    text = nn.Sequential(nn.Embedding(30, WIDTH), nn.Linear(WIDTH, 30)).double()

    def of_tokens(module, batch):
        return F.cross_entropy(module(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())

    assert tower_of(capture(text, of_tokens, without[0], CPU)[0]) == Tower()
    images = [{"x": batch["patches"]} for batch in data(2)]
    assert tower_of(capture(nn.Linear(6, 3).double(), lambda m, b: m(b["x"]).square().mean(), images[0], CPU)[0]) == Tower()


@pytest.mark.parametrize(("shape", "mesh", "dim"), [
    ((4, 6, 9), {"tp": 2}, 0),                    # samples, if both divide
    ((4, 6, 9), {"tp": 3}, 1),
    ((4, 6, 9), {"dp_shard": 4, "tp": 2}, 1),     # a rank of dp_shard has one sample
    ((8, 6, 9), {"dp_shard": 4, "tp": 2}, 0),
    ((3, 6, 9), {"cp": 2, "tp": 2}, 0),           # 3 of 4 are as many as 3 of 4 patches
    ((1, 1, 9), {"tp": 2}, 0),
])  # fmt: skip
def test_the_dim_that_wastes_least_is_shared(shape, mesh, dim):
    mesh = Mesh.of(mesh)
    assert dim_to_share(place_batch(shape, mesh), mesh, "tp") == dim


@pytest.mark.parametrize(("rows", "mesh"), [
    (4, {"tp": 2}), (3, {"tp": 2}), (3, {"tp": 3}), (5, {"dp_shard": 2, "tp": 3}), (2, {"dp_shard": 2, "tp": 2}),
    (3, {"cp": 2, "tp": 2}), (2, {"cp": 2, "tp": 3}), (1, {"tp": 5}),
], ids=str)  # fmt: skip
@pytest.mark.sample(2)
def test_training_is_that_of_one_device(rows, mesh):
    step = trained_alike(model(), loss, data(rows), mesh, passes=SHARED | {"verify": "numeric"})
    assert "tp" in placed(step)["patches"]
    assert all("tp" not in spec for name, spec in placed(step).items() if name.startswith(("tower", "places")))
    assert any("tp" in spec for name, spec in placed(step).items() if name.startswith("text"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("passes", [SHARED, {"shard": {"tower": "data", "sequence_parallel": False}}], ids=str)
def test_samples_of_microbatches_are_shared(passes):
    trained_alike(model(), loss, data(4), {"dp_shard": 2, "tp": 2}, microbatches=2, passes=passes)


def test_tokens_of_a_sample_are_exchanged_for_heads():
    """With one sample, ranks share its patches; attention over them is split by heads instead."""
    step = trained_alike(model(), loss, data(1), {"tp": 2}, passes=SHARED)
    (reshards,) = [record["report"]["reshards"] for record in step.report["passes"] if record["name"] == "shard"]
    exchanged = [line for line in map(str, reshards) if "all_to_all" in line]
    assert len(exchanged) == 4 and sum("exchanged back" in line for line in exchanged) == 1


def test_evaluation_is_that_of_one_device():
    batch = data(3)[0]
    step = compile_lockstep(model(), loss, batch, {"tp": 3}, evaluate=True, passes=SHARED)
    assert step.evaluate(batch) == pytest.approx(loss(model(), batch).item(), rel=EXACT)


def test_a_run_that_shares_images_is_evaluated_on_one_rank():
    batch = data(2)[0]
    step = compile_step(model(), loss, batch, passes=SHARED, train=False)
    assert step.evaluate(batch) == pytest.approx(loss(model(), batch).item(), rel=EXACT)


def test_without_ranks_to_share_images_or_without_a_tower_it_is_refused():
    with pytest.raises(UserError, match="mesh.tp is 1; set it to weights"):
        compile_lockstep(model(), loss, data(2)[0], {"dp_shard": 2}, passes=SHARED)
    with pytest.raises(UserError, match="no weights are used by images alone; set it to weights"):
        compile_lockstep(llama(), llama_loss, batches()[0], {"tp": 2}, passes=SHARED)


@pytest.mark.sweep(8)
@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), [
    (name, mesh)
    for entries in (vision.MODELS, grids.MODELS) for name in (entry.name for entry in entries)
    for mesh in ("tp 2", "dp_shard 2 x tp 3")
])  # fmt: skip
def test_models_of_transformers_train_by_value(name, mesh):
    entry = next(entry for entry in (*vision.MODELS, *grids.MODELS) if entry.name == name)
    (record,) = judge.judge(entry, [mesh], SHARED)
    assert record["verdict"] == "right", record["why"]
