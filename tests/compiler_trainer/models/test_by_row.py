"""Images by row: the results of transformers where all rows have all images, and of each row alone where some lack."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import compiler_trainer as ct
from compiler_trainer import UserError
from compiler_trainer.capture.capture import capture
from compiler_trainer.capture.compare import captured_difference
from compiler_trainer.models.by_row import ByRow, put
from passes.ir import ir
from tests.nightly.models import judge
from tests.nightly.models.case import MESHES
from tests.nightly.models.zoo import grids, vision

WIDTH, PER_ROW = 3, 4
SHARED = {"shard": {"tower": "data"}}


def rows(*marks: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [B, T, 3], a mask [B, T] and features [B * 4, 3]."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[mark == "i" for mark in row] for row in marks])
    x = torch.randn(*mask.shape, WIDTH, generator=generator)
    return x, mask, torch.randn(len(marks) * PER_ROW, WIDTH, generator=generator)


def by_row(x, mask, source):
    with ByRow(len(x), source):
        return x.masked_scatter(mask.unsqueeze(-1), source)


def test_with_all_images_it_is_masked_scatter():
    x, mask, source = rows("iitiit", "tiiiit", "ttiiii")
    assert torch.equal(by_row(x, mask, source), x.masked_scatter(mask.unsqueeze(-1), source))
    with ByRow(3, source):
        spread = x.masked_scatter(mask.unsqueeze(-1).expand_as(x), source)
    assert torch.equal(spread, by_row(x, mask, source))


def test_a_row_that_lacks_an_image_has_its_own_features():
    x, mask, source = rows("iitttt", "tiiiit", "tttttt")
    result = by_row(x, mask, source)
    assert torch.equal(result[0, :2], source[:2])
    assert torch.equal(result[1, 1:5], source[4:8])
    assert torch.equal(result[2], x[2])


def test_an_image_token_without_a_feature_is_not_a_number():
    result = by_row(*rows("iiiiit"))
    assert result[0, 4].isnan().all() and not result[0, [0, 1, 2, 3, 5]].isnan().any()


def test_entries_at_image_tokens_are_read_and_written_by_row():
    x, mask, source = rows("iitttt", "tiiiit")
    with ByRow(2, source):
        x.masked_scatter(mask.unsqueeze(-1), source)  # tells how many features a row has
        selected = x[mask, :]
        written = x.clone()
        written[mask, :] = selected + source
    assert torch.equal(selected[:2], x[0, :2]) and torch.equal(selected[4:], x[1, 1:5])
    assert torch.equal(written, torch.where(mask.unsqueeze(-1), x + put(x, mask, source.view(2, 4, 3)) , x))


class Sized(nn.Module):
    """Reads sizes as models of images of many sizes do; `left_out` images are padding, as all zeros are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, pixels, sizes):
        pixels = pixels[(pixels == 0).sum((1, 2)) != pixels[0].numel()]
        counts = sizes.prod(-1)
        borders = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        cut = [image[: int(h), :w] for image, (h, w) in zip(pixels, sizes)]
        parts = torch.cat([part.reshape(h * w) for part, (h, w) in zip(cut, sizes)])
        mask = torch.zeros(len(parts), len(parts))
        start = 0
        for size in counts.tolist():
            mask[start : start + size, start : start + size] = 1
            start += size
        window = (counts.cumsum(0) - 1)[counts != 0]
        scores = mask * self.layer(parts.view(-1, 4)).flatten()
        return (scores * (1 + borders)).sum(1)[window].square().sum()


def sized_loss(model, batch):
    with ByRow(2, batch["pixels"]):
        return model(batch["pixels"], torch.tensor([[2, 4], [4, 4]]))


def test_sizes_are_known_in_a_capture():
    batch = {"pixels": torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))}
    assert captured_difference(Sized(), sized_loss, batch) == ""


class Asking(nn.Module):
    """Writes where a mask is true, if it is anywhere, and puts features with padding at image tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, marked, is_image, features, is_real):
        features = self.layer(features)[is_real]
        parts = torch.split(features, is_real.sum(1).tolist())
        x = x.masked_scatter(is_image.unsqueeze(-1), torch.cat(parts))
        if marked.any():
            x = x.clone()
            x[marked] = self.layer.bias
        return x.square().sum()


@pytest.mark.parametrize("is_anywhere", [True, False])
def test_branches_that_save_work_and_uneven_features_are_captured(is_anywhere):
    generator = torch.Generator().manual_seed(0)
    batch = {
        "x": torch.randn(2, 7, WIDTH, generator=generator),
        "marked": torch.zeros(2, 7, dtype=torch.bool),
        "is_image": torch.tensor([[0, 1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 1, 0]]).bool(),
        "features": torch.randn(4, 3, WIDTH, generator=generator),  # two images a row
        "is_real": torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0]]).bool(),
    }
    batch["marked"][:, 5] = is_anywhere
    model = Asking()
    expected = model(**batch)

    def loss(model, batch):
        with ByRow(2, batch["features"]):
            return model(**batch)

    assert torch.allclose(loss(model, batch), expected)
    assert captured_difference(model, loss, batch) == ""


def test_without_the_mode_they_are_refused():
    with pytest.raises(UserError, match="test_by_row.py"):
        capture(Sized(), lambda m, b: m(b["pixels"], torch.tensor([[2, 4], [4, 4]])), {"pixels": torch.randn(2, 4, 4)},
                torch.device("cpu"))


BY_NAME = {entry.name: entry for entry in (*vision.MODELS, *grids.MODELS)}
CASES = [(name, mesh) for name in BY_NAME for mesh in BY_NAME[name].meshes]
QUICK = (("smolvlm", "tp 2"),)


@pytest.mark.sweep(12)
@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.full]) for case in CASES
])  # fmt: skip
def test_models_of_transformers_train_by_value(name, mesh):
    (record,) = judge.judge(BY_NAME[name], [mesh])
    assert record["verdict"] == "right", record["why"]
    if mesh == "dp_shard 2":
        assert set(record["gathered"]) <= GATHERED.get(name, set())


# Operators over the images of all rows as one sequence: of patches, or of attention within each image.
GATHERED = {
    "llava_pixtral": {"unbind"}, "mistral3": {"unbind"},
}  # fmt: skip


@pytest.mark.full
def test_ranks_of_cp_share_the_tower():
    alone, shared = (rows_of_layers("qwen2_vl", "visual", mesh) for mesh in ({}, MESHES["cp 2"]))
    assert len(alone) > 8 and shared == [rows // 2 for rows in alone]


@pytest.mark.full
def test_ranks_of_tp_share_the_tower():
    alone = rows_of_layers("qwen2_vl", "visual", {})
    shared = rows_of_layers("qwen2_vl", "visual", {"tp": 2, "dp_shard": 3}, SHARED)
    assert len(alone) > 8 and shared == [rows // 6 for rows in alone]


def rows_of_layers(name, tower, mesh, passes=None):
    """Return the numbers of patches, or of tokens, that a rank's linear layers of a tower take, in order."""
    case, sharded = judge.prepare(BY_NAME[name].build(), torch.float64), {}

    def observe(program, record):
        if record.name == "shard":
            sharded.setdefault("program", program)

    ct.compile_step(case.model, case.loss, case.batches[0], mesh=mesh, passes=passes, ranks="lockstep", observe=observe)
    calls = [node for node in sharded["program"].calls() if tower in ir.module_path(node)]
    return [ir.example(node).shape[0] for node in calls if node.target is torch.ops.aten.linear.default]
