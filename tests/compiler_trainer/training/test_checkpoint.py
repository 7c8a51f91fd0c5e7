"""A checkpoint of one mesh is read bit for bit on any other; an unfinished one never is."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

from compiler_trainer.config.errors import UserError
from compiler_trainer.training import checkpoint
from passes.program.mesh import Mesh
from passes.program.spec import Factor, Spec, boxes, shard

EXTRA = {"step": 3, "tokens": 48, "data": {"epoch": 0, "index": 12, "seed": None}}
GARBAGE = -77.0


@dataclass
class FakeStep:
    """State of the given placements on some ranks of a mesh."""

    mesh: Mesh
    ranks: tuple[int, ...]
    state: dict[str, tuple[Spec, dict[int, torch.Tensor]]]

    def tensors(self):
        return self.state


def dim(*factors):
    """`dim((5, "tp"), 3)`: five entries on tp, major to three."""
    return tuple(Factor(f[0], f[1:]) if isinstance(f, tuple) else Factor(f) for f in factors)


FULL = {
    "model.matrix": torch.randn(7, 6),
    "model.fused": torch.randn(2, 15).to(torch.bfloat16),
    "optim.exp_avg.matrix": torch.randn(7, 6),
    "optim.step": torch.tensor(3.0),
    "model.counts": torch.arange(5),
    "model.empty": torch.randn(0, 4),
}
WHOLE = {name: Spec.whole(full.shape) for name, full in FULL.items()}


def layout(sizes, matrix, fused, counts):
    """(mesh, placements); what is not given is a copy on every rank."""
    specs = {"model.matrix": Spec(matrix), "optim.exp_avg.matrix": Spec(matrix), "model.fused": Spec(fused),
             "model.counts": Spec((counts,))}
    return Mesh.of(sizes), {**WHOLE, **specs}


SHARD, TP = "dp_shard", "tp"
LAYOUTS = {
    "one": (Mesh.of({}), WHOLE),
    "replicated": (Mesh.of({"dp_replicate": 3}), WHOLE),
    "two": layout({SHARD: 2}, (dim((7, SHARD)), dim(6)), (dim(2), dim((5, SHARD), 3)), dim((5, SHARD))),
    "three": layout({SHARD: 3}, (dim((7, SHARD)), dim(6)), (dim(2), dim(3, (5, SHARD))), dim((5, SHARD))),
    "four": layout({SHARD: 4}, (dim(7), dim((6, SHARD))), (dim((2, SHARD)), dim(15)), dim((5, SHARD))),
    "hybrid": layout({"dp_replicate": 2, SHARD: 2}, (dim((7, SHARD)), dim(6)), (dim(2), dim(15)), dim((5, SHARD))),
    "two axes, one dim": layout({SHARD: 2, TP: 2}, (dim((7, TP, SHARD)), dim(6)), (dim(2), dim((3, TP), (5, SHARD))),
                                dim((5, TP))),
    "two axes, two dims": layout({SHARD: 2, TP: 3}, (dim((7, SHARD)), dim((6, TP))), (dim((2, SHARD)), dim((15, TP))),
                                 dim(5)),
    "experts": layout({SHARD: 4, "ep": 2}, (dim((7, "ep")), dim((6, SHARD))), (dim(2), dim((15, "fsdp"))), dim((5, "ep"))),
    "experts over tp": layout({SHARD: 2, TP: 2, "ep": 4}, (dim((7, "experts_tp")), dim(6)), (dim(2), dim((15, "ep"))),
                              dim(5)),
}


def build(name, fill, ranks=None):
    """The layout's step on `ranks` (all by default), every value taken from `fill`, padding garbage."""
    mesh, specs = LAYOUTS[name]
    ranks = tuple(range(mesh.world_size)) if ranks is None else ranks
    state = {}
    for key, spec in specs.items():
        padded = replace(spec, fill=GARBAGE)
        state[key] = (spec, {r: shard(fill[key], padded, mesh, mesh.coordinates(r)) for r in ranks})
    return FakeStep(mesh, ranks, state)


def blank(name, ranks=None):
    return build(name, {key: torch.full_like(full, GARBAGE) for key, full in FULL.items()}, ranks)


def assert_same(found, expected):
    """Every local tensor equal bit for bit, padding included."""
    for key, (_, local) in expected.tensors().items():
        for rank, tensor in local.items():
            assert torch.equal(found.tensors()[key][1][rank], tensor), (key, rank)


def save(step, folder, number=3, keep=2):
    return checkpoint.save(step, folder, number, EXTRA, keep)


@pytest.mark.parametrize("to", LAYOUTS)
@pytest.mark.parametrize("origin", LAYOUTS)
def test_any_mesh_to_any_mesh(origin, to, tmp_path):
    path = save(build(origin, FULL), tmp_path)
    found = blank(to)
    assert checkpoint.load(found, path) == EXTRA
    assert_same(found, build(to, FULL))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_entry_is_stored_once(name, tmp_path):
    path = save(build(name, FULL), tmp_path)
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    sizes = {key: sum(torch.Size(chunk.sizes).numel() for chunk in tensor.chunks) for key, tensor in stored.items()}
    assert sizes == {key: full.numel() for key, full in FULL.items() if full.numel()}


def test_local_views_are_what_is_read_into(tmp_path):
    step = blank("two axes, one dim")
    before = {(key, r): t.data_ptr() for key, (_, local) in step.tensors().items() for r, t in local.items()}
    checkpoint.load(step, save(build("three", FULL), tmp_path))
    after = {(key, r): t.data_ptr() for key, (_, local) in step.tensors().items() for r, t in local.items()}
    assert after == before


def test_a_partial_sum_is_no_state(tmp_path):
    spec = Spec((dim(2),), partial=(("tp", "sum"),))
    step = FakeStep(Mesh.of({"tp": 2}), (0, 1), {"x": (spec, {0: torch.ones(2), 1: torch.ones(2)})})
    with pytest.raises(ValueError, match="partial sum"):
        save(step, tmp_path)


# What is found


def test_latest_is_the_highest_step(tmp_path):
    assert checkpoint.latest(tmp_path / "absent") is None
    for number in (9, 10, 100_000_000):
        path = save(build("one", FULL), tmp_path, number, keep=9)
        assert checkpoint.latest(tmp_path) == path
    assert path.name == "step_100000000"


def test_keep_deletes_the_oldest(tmp_path):
    for number in (1, 2, 3, 4):
        save(build("two", FULL), tmp_path, number, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000003", "step_00000004"]


WRITER = dcp.FileSystemWriter
MOMENTS = {"data": (WRITER, "write_data"), "metadata": (WRITER, "finish"), "extra": (json, "dumps")}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_torn_checkpoint_is_not_used_and_goes_with_the_next_save(moment, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    first = save(build("two", FULL), tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(*MOMENTS[moment], fail)
        with pytest.raises((RuntimeError, OSError), match="disk full"):
            save(build("two", FULL), tmp_path, 2)
    assert [p.name for p in tmp_path.glob("*.tmp")] == ["step_00000002.tmp"]
    assert checkpoint.latest(tmp_path) == first
    with pytest.raises(UserError, match="no complete checkpoint"):
        checkpoint.load(blank("two"), tmp_path / "step_00000002.tmp")
    save(build("two", FULL), tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


@pytest.mark.parametrize("lost", [checkpoint.METADATA, checkpoint.EXTRA])
def test_a_folder_that_lacks_a_file_is_not_used(lost, tmp_path):
    first, second = (save(build("one", FULL), tmp_path, number) for number in (1, 2))
    (second / lost).unlink()
    assert checkpoint.latest(tmp_path) == first


# What is refused


def refusal(step, path):
    with pytest.raises(UserError) as caught:
        checkpoint.load(step, path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_folder_is_named(tmp_path):
    assert str(tmp_path / "nowhere") in refusal(blank("one"), tmp_path / "nowhere")


def test_a_folder_of_checkpoints_names_them(tmp_path):
    save(build("one", FULL), tmp_path, 5)
    assert "step_00000005" in refusal(blank("one"), tmp_path)


def test_other_tensors_are_named_and_nothing_is_read(tmp_path):
    path = save(build("one", FULL), tmp_path)
    step = blank("one")
    del step.state["optim.step"], step.state["model.counts"]
    step.state["model.matrix"] = (Spec.whole((8, 6)), {0: torch.full((8, 6), GARBAGE)})
    step.state["model.fused"] = (WHOLE["model.fused"], {0: torch.full((2, 15), GARBAGE)})
    step.state["model.new"] = (Spec.whole((1,)), {0: torch.full((1,), GARBAGE)})
    message = refusal(step, path)
    assert "model.matrix is float32[7, 6] in it and float32[8, 6] here" in message
    assert "model.fused is bfloat16[2, 15] in it and float32[2, 15] here" in message
    assert "model.new is absent in it and float32[1] here" in message
    assert "and 2 more" in message
    assert all((local[0] == GARBAGE).all() for _, local in step.tensors().values())


# Processes


def as_one_rank(rank, name, folder):
    mesh = LAYOUTS[name][0]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=mesh.world_size)
    full = torch.load(folder / "full.pt")
    path = checkpoint.save(build(name, full, (rank,)), folder / "checkpoints", 1, EXTRA, keep=1)
    found = blank(name, (rank,))
    checkpoint.load(found, path)
    assert_same(found, build(name, full, (rank,)))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["two"])
def test_saved_by_processes_read_by_one(name, tmp_path):
    torch.save(FULL, tmp_path / "full.pt")
    mp.spawn(as_one_rank, (name, tmp_path), nprocs=LAYOUTS[name][0].world_size)
    path = checkpoint.latest(tmp_path / "checkpoints")
    assert len(list(path.glob("*.distcp"))) == 2
    found = blank("three")
    checkpoint.load(found, path)
    assert_same(found, build("three", FULL))


def test_shards_own_what_they_should():
    """The layouts cover what can go wrong: padding, a rank that owns nothing, a dim in several rectangles."""
    mesh, specs = LAYOUTS["four"]
    counts = [len(boxes(specs["model.counts"], mesh, place)) for place in mesh]
    assert counts == [1, 1, 1, 0]
    mesh, specs = LAYOUTS["three"]
    assert [len(boxes(specs["model.fused"], mesh, place)) for place in mesh] == [3, 3, 3]
    assert specs["model.matrix"].padded(mesh)
