"""The work of a rank of a large job before its first step does not grow with the ranks; nothing is started."""

from __future__ import annotations

import pytest

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import for_predicting
from compiler_trainer.config.validate import dry_world_size, validate
from tools.startup import rows

OPTIONS = ("mesh.tp=2", "cluster=h100", "passes.verify=none", "train.microbatches=2")


def counts(*overrides):
    cfg = to_config(compose([*OPTIONS, *overrides]))
    return {name: (before, after) for name, before, after in rows(validate(for_predicting(cfg), dry_world_size(cfg)))}


@pytest.fixture(scope="module")
def large():
    """Return the counts for 4,096 ranks."""
    return counts("mesh.pp=2", "mesh.dp_shard=1024", "train.global_batch_size=2048")


@pytest.mark.full
def test_groups_do_not_grow_with_the_ranks(large):
    before, after = large["`new_group` calls of a rank"]
    small, few = counts("mesh.pp=2", "mesh.dp_shard=2", "train.global_batch_size=8")["`new_group` calls of a rank"]
    assert after == few < 10 and small == 20 and before > 4096


@pytest.mark.full
def test_a_rank_draws_and_reads_its_share(large):
    total, mine = large["numbers that a rank draws"]
    assert total / 4096 <= mine < total / 1024
    assert large["checkpoint headers that a rank reads"] == (4096, 1)
    assert large["headers that all ranks read"] == (4096**2, 4096)
    assert large["files with pieces that it reads"][1] <= 8
