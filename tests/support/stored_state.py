"""State of many placements, saved and loaded without a model, and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from compiler_trainer import checkpoint
from compiler_trainer.config.schema import CheckpointConfig
from passes.ir.mesh import Mesh
from passes.ir.spec import Factor, Spec, shard

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
    """Return the factors of a dim; `dim((5, "tp"), 3)` is five entries on tp, major to three."""
    return tuple(Factor(f[0], f[1:]) if isinstance(f, tuple) else Factor(f) for f in factors)


torch.manual_seed(7)
FULL = {
    "model.matrix": torch.randn(7, 6),
    "model.fused": torch.randn(2, 15).to(torch.bfloat16),
    "optim.exp_avg.matrix": torch.randn(7, 6),
    "optim.exp_avg.codes": torch.randint(0, 256, (7, 6), dtype=torch.uint8),
    "optim.exp_avg.float8": torch.randn(7, 6).to(torch.float8_e4m3fn),
    "optim.step": torch.tensor(3.0),
    "model.counts": torch.arange(5),
    "model.turns": torch.randn(2, 15, dtype=torch.complex64),
    "model.mask": torch.randn(2, 15) > 0,
    "model.empty": torch.randn(0, 4),
}
WHOLE = {name: Spec.whole(full.shape) for name, full in FULL.items()}


def layout(sizes, matrix, fused, counts):
    """Return (mesh, placements); tensors that are not given are copies on every rank."""
    like_matrix = ("model.matrix", "optim.exp_avg.matrix", "optim.exp_avg.codes", "optim.exp_avg.float8")
    specs = {name: Spec(matrix) for name in like_matrix} | {"model.counts": Spec((counts,))}
    return Mesh.of(sizes), {**WHOLE, **specs, "model.fused": Spec(fused), "model.turns": Spec(fused)}


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
}  # fmt: skip


def build(name, fill=FULL, ranks=None):
    """Return the layout's step on `ranks` (all by default), with every value from `fill` and garbage in padding."""
    mesh, specs = LAYOUTS[name]
    ranks = tuple(range(mesh.world_size)) if ranks is None else ranks
    state = {}
    for key, spec in specs.items():
        padded = replace(spec, fill=1 if fill[key].dtype == torch.uint8 else GARBAGE)
        state[key] = (spec, {r: shard(fill[key], padded, mesh, mesh.coordinates(r)) for r in ranks})
    return FakeStep(mesh, ranks, state)


def blank(name, ranks=None):
    """Return the layout's step with garbage everywhere."""
    return build(name, {key: torch.full(full.shape, 1.0).to(full.dtype) for key, full in FULL.items()}, ranks)


def assert_same(found, expected):
    """Assert that every local tensor is equal bit for bit, padding included."""
    for key, (_, local) in expected.tensors().items():
        for rank, tensor in local.items():
            assert torch.equal(bits(found.tensors()[key][1][rank]), bits(tensor)), (key, rank)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def state_at(number, **changes):
    """Return the training state after a step."""
    given = {"step": number, "tokens": 16 * number, "data": {"index": 4 * number}, "config": {"model": {"dim": 16}}}
    return checkpoint.TrainState(**given | changes)


def saved(step, folder, number=3, keep=9):
    """Save a checkpoint of a step and return its path."""
    with checkpoint.Saver(step, folder, CheckpointConfig(keep=keep)) as saver:
        saver.save(state_at(number))
    return folder / f"step_{number:08}"
