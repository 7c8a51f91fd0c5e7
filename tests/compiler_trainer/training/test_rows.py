"""A rank's own samples are those that its step reads: changing other samples does not change its inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import SEQ_LEN, batches, compile_lockstep, llama, llama_loss

from compiler_trainer.step.batch_layout import BatchLayout
from compiler_trainer.training.prepare import own_rows

MESHES = {
    "uneven": ({"dp_shard": 4}, 6, 1),
    "hsdp": ({"dp_replicate": 2, "dp_shard": 2}, 8, 1),
    "tp": ({"dp_shard": 2, "tp": 2}, 6, 1),
    "cp": ({"dp_shard": 2, "cp": 2}, 4, 1),
    "microbatches": ({"dp_shard": 2}, 12, 3),
    "pp": ({"pp": 2, "dp_shard": 2}, 8, 2),
}


@pytest.mark.parametrize(("mesh", "rows", "microbatches"), MESHES.values(), ids=MESHES)
@pytest.mark.sample(2)
def test_a_rank_is_given_its_own_rows_and_every_row_is_some_ranks(mesh, rows, microbatches):
    batch = batches(rows=rows)[0]
    step = compile_lockstep(llama(n_layers=2), llama_loss, batch, mesh, microbatches=microbatches, lower={"backend": "eager"})
    own = {rank: own_rows(step, [rank]) for rank in step.ranks}
    assert sorted(set(np.concatenate(list(own.values())).tolist())) == list(range(rows))
    assert all(len(result) <= -(-rows // microbatches // 2) * microbatches for result in own.values())
    assert own_rows(step, step.ranks).tolist() == list(range(rows))
    assert {result.dtype for result in own.values()} == {np.dtype(np.int64)}  # also for ranks without a sample
    for rank, mine in own.items():
        others = np.setdiff1d(np.arange(rows), mine)
        outline = {name: value.clone() for name, value in batch.items()}
        for name in ("tokens", "labels"):
            outline[name][others] = torch.zeros(len(others), SEQ_LEN, dtype=torch.int64)
        for compiled in step.train.values():
            inputs = [each for each in compiled.finished.inputs if each.kind == "batch"]
            for whole, part in zip(step.split(batch), step.split(outline)):
                fed = [[step.value(each, rank, BatchLayout(compiled.finished, half), {}) for each in inputs] for half in (whole, part)]
                assert all(torch.equal(a, b) for a, b in zip(*fed))
