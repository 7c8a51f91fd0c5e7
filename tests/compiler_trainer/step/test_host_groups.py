"""Process groups over host memory run their collectives one after another."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from compiler_trainer.step.ranks import HOST, PATIENCE, gather, host_group, new_group


@pytest.fixture
def alone():
    dist.init_process_group(HOST, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77))
    yield
    dist.destroy_process_group()


def test_no_two_collectives_of_a_group_run_at_once(alone):
    """Two corrupt the heap: torch 2.13.0 aborts once in a few hundred steps."""
    further = host_group()
    for group in (dist.group.WORLD, dist.new_group([0]), further):
        options = group._get_backend(torch.device("cpu")).options
        assert options._threads == 1
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
    assert gather({"a": 1}, further) == [{"a": 1}]
    x = torch.ones(3)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert x.tolist() == [1, 1, 1]


def test_ranks_wait_for_others_that_compile_in_every_group(alone):
    """NCCL's default timeout is ten minutes, and would end a job in which one rank compiles for longer."""
    for group in (new_group(), new_group([0]), host_group()):
        assert group._get_backend(torch.device("cpu")).options._timeout == PATIENCE
