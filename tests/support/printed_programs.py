"""Programs for tests that read their text."""

from __future__ import annotations

from dataclasses import replace

import torch
from small_programs import Small, cut
from torch import nn

from compiler_trainer.capture.capture import capture
from passes.autograd.joint import Joint
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.record import Origin
from passes.ir.spec import Spec
from passes.ops import reshard
from passes.sharding.normalize import Normalize
from passes.sharding.place import Place
from passes.sharding.shard import Shard

aten = torch.ops.aten
F32 = torch.float32


def linear_program() -> tuple[Small, ir.Program]:
    """Return a sharded weight gathered for a linear layer over a sharded batch of 3 rows, and its sum."""
    small = Small(dp_shard=2)
    w = small.input("wq.weight", cut((8, 4), dp_shard=0), dtype=F32)
    x = small.input("x", cut((3, 4), dp_shard=0), "batch", F32)
    full = small.call(reshard.all_gather, w, 0, "dp_shard", 2, 8, F32, None)
    y = small.call(aten.linear.default, x, full, spec=cut((3, 8), dp_shard=0))
    ir.update(y, origin=Origin("model.py:31", ("", "layers.0.wq")))
    total = small.call(aten.sum.dim_IntList, y, [0, 1], dtype=F32, spec=Spec((), (("dp_shard", "sum"),)))
    done = small.call(reshard.psum, total, "dp_shard", F32, None, phase="backward")
    return small, small.program([("loss", "loss", done, Spec(()))])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)).transpose(0, 1).contiguous().transpose(0, 1)
        return x


def joint(mesh: dict[str, int]) -> ir.Program:
    """Return the joint program of a small net, captured again at each call."""
    program, ctx = capture(Net(), lambda m, b: m(b["x"]).square().mean(), {"x": torch.randn(5, 5)}, torch.device("cpu"))
    program = replace(program, mesh=Mesh.of(mesh))
    for rewrite in (Normalize(), Place({"layers.*.weight": {"tp": 0}}), Shard(), Joint()):
        program, _ = rewrite(program, ctx)
    return program
