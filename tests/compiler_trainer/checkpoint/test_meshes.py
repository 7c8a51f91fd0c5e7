"""A checkpoint of one mesh is read bit for bit on any other, and every entry is stored once."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from stored_state import FULL, LAYOUTS, WHOLE, FakeStep, assert_same, bits, blank, build, dim, saved, state_at

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import pieces
from compiler_trainer.checkpoint.index import FullTensor
from compiler_trainer.checkpoint.load import check_tensors
from compiler_trainer.config.errors import UserError
from passes.ir.mesh import Mesh
from passes.ir.spec import Spec, boxes


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("origin", LAYOUTS)
def test_any_mesh_to_any_mesh(origin, to, tmp_path):
    stored = checkpoint.opened(saved(build(origin), tmp_path))
    result = blank(to)
    checkpoint.load(result, stored)
    assert_same(result, build(to))
    assert (stored.index.step, stored.index.data) == (3, state_at(3).data)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_entry_is_stored_once(name, tmp_path):
    stored = checkpoint.opened(saved(build(name), tmp_path))
    sizes = {key: sum(math.prod(piece.place[1]) for piece in result) for key, result in stored.pieces.items()}
    assert sizes == {key: full.numel() for key, full in FULL.items() if full.numel()}


def test_large_rectangles_are_cut_and_the_pieces_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 24)
    stored = checkpoint.opened(saved(build("two axes, two dims"), tmp_path))
    assert max(piece.read().nbytes for result in stored.pieces.values() for piece in result) <= 24
    assert len(stored.pieces["model.matrix"]) == 9
    result = blank("three")
    checkpoint.load(result, stored)
    assert_same(result, build("three"))


def test_ranks_with_the_same_copies_write_about_as_much():
    full = {f"model.{i}": torch.zeros(10 + i, 3) for i in range(40)}
    mesh = Mesh.of({"dp_replicate": 4})
    state = {name: (Spec.whole(t.shape), {r: t for r in range(4)}) for name, t in full.items()}
    loads = [sum(math.prod(box.size) for _, box in pieces.written_by(rank, state, mesh)) for rank in range(4)]
    assert sum(loads) == sum(t.numel() for t in full.values()) and max(loads) - min(loads) <= 3 * 49


def test_full_tensors_of_the_model_are_read_by_their_own_names(tmp_path):
    result = checkpoint.read_model(saved(build("two axes, one dim"), tmp_path))
    assert result.keys() == {name.removeprefix("model.") for name in FULL if name.startswith("model.")} - {"empty"}
    assert all(torch.equal(bits(value), bits(FULL[f"model.{name}"])) for name, value in result.items())


def test_local_views_are_what_is_read_into(tmp_path):
    step = blank("two axes, one dim")
    before = {(key, r): t.data_ptr() for key, (_, local) in step.tensors().items() for r, t in local.items()}
    checkpoint.load(step, checkpoint.opened(saved(build("three"), tmp_path)))
    after = {(key, r): t.data_ptr() for key, (_, local) in step.tensors().items() for r, t in local.items()}
    assert after == before


def test_a_partial_sum_is_no_state(tmp_path):
    spec = Spec((dim(2),), partial=(("tp", "sum"),))
    step = FakeStep(Mesh.of({"tp": 2}), (0, 1), {"x": (spec, {0: torch.ones(2), 1: torch.ones(2)})})
    with pytest.raises(ValueError, match="partial sum"):
        saved(step, tmp_path)


# Refusals


def refusal(step, path):
    with pytest.raises(UserError) as caught:
        checkpoint.load(step, checkpoint.opened(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_folder_is_named(tmp_path):
    assert str(tmp_path / "nowhere") in refusal(blank("one"), tmp_path / "nowhere")


def test_a_folder_of_checkpoints_names_them(tmp_path):
    saved(build("one"), tmp_path, 5)
    assert "step_00000005" in refusal(blank("one"), tmp_path)


def test_the_format_before_is_named(tmp_path):
    (tmp_path / ".metadata").touch()
    assert "in another version's format" in refusal(blank("one"), tmp_path)


def test_other_tensors_are_named_and_nothing_is_read(tmp_path):
    path = saved(build("one"), tmp_path)
    step = blank("one")
    del step.state["optim.step"], step.state["model.counts"]
    step.state["model.matrix"] = (Spec.whole((8, 6)), {0: torch.ones(8, 6)})
    step.state["model.fused"] = (WHOLE["model.fused"], {0: torch.ones(2, 15)})
    step.state["model.new"] = (Spec.whole((1,)), {0: torch.ones(1)})
    message = refusal(step, path)
    assert "model.matrix is float32[7, 6] there and float32[8, 6] here" in message
    assert "model.fused is bfloat16[2, 15] there and float32[2, 15] here" in message
    assert "model.new is absent there and float32[1] here" in message
    assert "and 2 more" in message
    assert all((local[0] == 1).all() for _, local in step.tensors().values())


def test_a_dtype_that_cannot_be_stored_is_refused_before_training(tmp_path):
    local = torch.empty(2, dtype=torch.float4_e2m1fn_x2)
    step = FakeStep(Mesh.of({}), (0,), {"x": (Spec.whole((2,)), {0: local})})
    with pytest.raises(UserError, match="x is torch.float4_e2m1fn_x2, which cannot be stored; set checkpoint.interval=null"):
        checkpoint.Saver(step, tmp_path, None)


# Processes


def as_one_rank(rank, name, folder):
    mesh = LAYOUTS[name][0]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=mesh.world_size)
    step = build(name, ranks=(rank,))
    path = saved(step, folder / "checkpoints", 1)
    result = build(name, {key: torch.zeros_like(full) for key, full in FULL.items()}, ranks=(rank,))
    checkpoint.load(result, checkpoint.opened(path))
    assert_same(result, step)
    if rank == 1:  # if one rank finds damage, no rank continues
        checkpoint.load.__globals__["fill"] = damaged
    try:
        checkpoint.load(result, checkpoint.opened(path))
        raise AssertionError("loaded")
    except checkpoint.Damaged as error:
        assert str(error) == "file: broken"
    dist.destroy_process_group()


def damaged(*args):
    raise checkpoint.Damaged("file", "broken")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["two"])
def test_saved_by_processes_read_by_one(name, tmp_path):
    mp.spawn(as_one_rank, (name, tmp_path), nprocs=LAYOUTS[name][0].world_size)
    path = checkpoint.complete(tmp_path / "checkpoints")[-1]
    assert len(list(path.glob("*.safetensors"))) == 2
    result = blank("three")
    checkpoint.load(result, checkpoint.opened(path))
    assert_same(result, build("three"))


def opens_one_header(rank, ranks, path, folder):
    opened = sys.modules["compiler_trainer.checkpoint.opened"]  # the package has a function of this name
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    read, read_header = [], opened.read_header
    opened.read_header = lambda file, size: read.append(file.name) or read_header(file, size)
    result = checkpoint.opened(path)
    assert read == [f"rank_{rank:05}.safetensors"]
    alone = opened.opened_alone(path)
    assert result.index == alone.index and result.pieces.keys() == alone.pieces.keys()
    assert all({*result.pieces[name]} == {*pieces} for name, pieces in alone.pieces.items())
    dist.barrier()
    if rank == 0:
        file = path / f"rank_{ranks - 1:05}.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    dist.barrier()
    with pytest.raises(checkpoint.Damaged, match=f"rank_{ranks - 1:05}.safetensors: has .* bytes, and .* were written"):
        checkpoint.opened(path)
    dist.destroy_process_group()


@pytest.mark.full
def test_each_header_is_read_by_one_rank(tmp_path):
    path = saved(build("four"), tmp_path / "checkpoints")
    ranks = len(list(path.glob("*.safetensors")))
    assert ranks > 2
    mp.spawn(opens_one_header, (ranks, path, tmp_path), nprocs=ranks)


def test_shards_own_what_they_should():
    """The layouts cover padding, a rank that owns nothing, and a dim in several rectangles."""
    mesh, specs = LAYOUTS["four"]
    counts = [len(boxes(specs["model.counts"], mesh, place)) for place in mesh]
    assert counts == [1, 1, 1, 0]
    mesh, specs = LAYOUTS["three"]
    assert [len(boxes(specs["model.fused"], mesh, place)) for place in mesh] == [3, 3, 3]
    assert specs["model.matrix"].padded(mesh)


def test_moments_with_other_widths_are_refused_with_the_options_that_decide_on_them():
    wide, narrow = (FullTensor(dtype, (64, 512)) for dtype in ("float32", "uint8"))
    scale = FullTensor("float32", (64, 2))
    with pytest.raises(UserError, match="^here: has other tensors: optim.m.w is .*; keep model.*; which moments have 8 bits .* keep mesh and optim.block"):
        check_tensors({"optim.m.w": wide}, {"optim.m.w": narrow, "optim.m.w.scale": scale}, Path("here"))
    with pytest.raises(UserError, match="train.ema as they were$"):
        check_tensors({"optim.m.w": wide}, {}, Path("here"))
