"""Copies that may drift apart are detected: an unreduced gradient, norm or result."""

from __future__ import annotations

import pytest
from joint_programs import joint

from passes.check.copies import check_copies
from passes.check.verify import verify_spec
from passes.ir import ir
from passes.memory.remat import Remat
from passes.ops import reshard
from passes.update.optimize import Optimize
from passes.update.optimizers import AdamW

MESHES = ((("dp_shard", 2), ("tp", 2)), (("dp_replicate", 2), ("tp", 2)), (("dp_replicate", 2), ("dp_shard", 2)))


def stepped(mesh) -> tuple[ir.Program, ir.Context]:
    """Return a full step with clipping, before its reshard operators are expanded."""
    program, ctx = joint(mesh)
    for rewrite in (Remat(), Optimize(AdamW(), 1.0)):
        program, _ = rewrite(program, ctx)
    return program, ctx


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.sample(2)
def test_copies_of_a_right_step_are_copies(mesh):
    assert not list(check_copies(stepped(mesh)[0])) and not list(check_copies(joint(mesh)[0]))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("phase", ["backward", "optimizer"])
@pytest.mark.sample(2)
def test_every_reduction_that_is_left_out_lets_copies_drift_apart(mesh, phase):
    reductions = [n.name for n in stepped(mesh)[0].calls() if n.target is reshard.psum and ir.phase(n) == phase]
    for name in reductions:
        program, ctx = stepped(mesh)
        node = next(n for n in program.calls() if n.name == name)
        node.replace_all_uses_with(node.args[0])
        program.graph.erase_node(node)
        with pytest.raises(ir.CompileError, match="is a full copy on every rank of"):
            verify_spec(program, ctx)
    assert reductions or (phase, mesh[1][0]) == ("backward", "dp_shard")


def test_the_loss_is_one_number():
    program = joint(MESHES[0])[0].copy()
    node = next(n for n in program.calls() if n.target is reshard.psum and n is program.results()[0])
    node.replace_all_uses_with(node.args[0])
    assert any("loss 'loss' is a full copy" in message for _, message in check_copies(program))
