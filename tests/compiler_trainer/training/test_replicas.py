"""A flipped bit in one of several copies is detected, named, and repaired if most ranks agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import NO_DECAY, compile_lockstep, perceptron, points, squared_error
from short_runs import options

from compiler_trainer.config.errors import RunError
from compiler_trainer.elastic.member import LeftOut
from compiler_trainer.training.anomalies import Replicas, bit_sum, differences


def step_of(**mesh):
    """Return a step on a mesh that has been taken once."""
    data = points(dtype=torch.float32)
    step = compile_lockstep(perceptron(dtype=torch.float32), squared_error, data[0], mesh, NO_DECAY)
    step(data[0])
    return step


def flip(step, name, rank, bit=12, at=0):
    _, local = step.tensors()[name]
    local[rank].detach().reshape(-1).view(torch.int32)[at] ^= 1 << bit


def a_weight(step):
    return next(name for name, (spec, _) in step.tensors().items() if name.endswith("weight"))


def replicas(step, folder, action):
    cfg = options(folder)
    check = replace(cfg.train.replica_check, action=action)
    return Replicas(replace(cfg, train=replace(cfg.train, replica_check=check)), step)


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 2}, {"dp_shard": 3}])
@pytest.mark.sample(2)
def test_copies_of_a_run_that_is_well_are_equal(mesh):
    assert differences(step_of(**mesh)) == []


@pytest.mark.parametrize("bit", [0, 12, 31])
@pytest.mark.sample(2)
def test_one_bit_of_two_replicas_ends_the_run_with_tensor_and_ranks(tmp_path, bit):
    step = step_of(dp_replicate=2)
    flip(step, a_weight(step), 1, bit, at=-1)
    message = f"{a_weight(step)} differs between ranks 0, 1, and no majority shows which is right after step 7"
    for action in ("stop", "repair"):
        with pytest.raises(RunError, match=f"^{message} .train.replica_check.action={action}.; .* resume {tmp_path}/run$"):
            replicas(step, tmp_path / "run", action).check(7)


def test_what_two_of_three_hold_is_given_to_the_third(tmp_path, capsys):
    step = step_of(dp_replicate=3)
    name = a_weight(step)
    before = {n: local[1].clone() for n, (_, local) in step.tensors().items()}
    flip(step, name, 1)
    with pytest.raises(RunError, match=f"^{name} on rank 1 differs from its copy on ranks 0, 2 after step 7"):
        replicas(step, tmp_path / "run", "stop").check(7)
    replicas(step, tmp_path / "run", "repair").check(7)
    assert f"after step 7: {name} on rank 1 differs from its copy on ranks 0, 2; repaired" in capsys.readouterr().out
    assert all(torch.equal(local[1], before[n]) for n, (_, local) in step.tensors().items())
    assert differences(step) == []


def test_the_ranks_of_the_minority_are_left_out(tmp_path):
    step = step_of(dp_replicate=3)
    name = a_weight(step)
    flip(step, name, 1)
    with pytest.raises(LeftOut, match=f"^{name} on rank 1 differs from its copy on ranks 0, 2 after step 7$") as caught:
        replicas(step, tmp_path / "run", "leave_out").check(7)
    assert caught.value.ranks == {1}
    step = step_of(dp_replicate=2)
    flip(step, a_weight(step), 1)
    with pytest.raises(RunError, match="no majority shows which is right after step 7 .train.replica_check.action=leave_out"):
        replicas(step, tmp_path / "run", "leave_out").check(7)


def test_shards_are_compared_with_their_own_copies(tmp_path):
    step = step_of(dp_replicate=3, dp_shard=2)
    name = a_weight(step)
    flip(step, name, 3)  # in replica 1, shard 1
    (result,) = differences(step)
    assert (result.name, result.right, result.wrong) == (name, (1, 5), (3,))


def test_zero_turns_it_off(tmp_path):
    step = step_of(dp_replicate=2)
    flip(step, a_weight(step), 1)
    cfg = options(tmp_path)
    Replicas(replace(cfg, train=replace(cfg.train, replica_check=replace(cfg.train.replica_check, interval=None))), step).check(7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_each_bit_counts_whatever_the_dtype_and_place(dtype):
    bytes_ = torch.zeros(64, dtype=torch.uint8)
    local = bytes_.view(dtype)[1:-1] if dtype != torch.bool else bytes_.view(dtype)[:13]
    whole, size = bit_sum(local, local.device), local.element_size()
    first = 0 if dtype == torch.bool else size
    for at in range(first, first + len(local) * size):
        for bit in range(8 if dtype != torch.bool else 1):
            bytes_[at] = 1 << bit
            assert bit_sum(local, local.device) != whole
        bytes_[at] = 0
