"""A rank's own samples are those that its step reads: changing other samples does not change its inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import SEQ_LEN, batches, compile_lockstep, llama, llama_loss

from compiler_trainer.step.batch_layout import BatchLayout

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
    own = {rank: step.samples_read([rank]).numpy() for rank in step.ranks}
    assert sorted(set(np.concatenate(list(own.values())).tolist())) == list(range(rows))
    assert all(len(result) <= -(-rows // microbatches // 2) * microbatches for result in own.values())
    assert step.samples_read(step.ranks).tolist() == list(range(rows))
    assert {result.dtype for result in own.values()} == {np.dtype(np.int64)}  # also for ranks without a sample
    for rank, mine in own.items():
        others = np.setdiff1d(np.arange(rows), mine)
        outline = {name: value.clone() for name, value in batch.items()}
        for name in ("tokens", "labels"):
            outline[name][others] = torch.full((len(others), SEQ_LEN), 3)
        for compiled in step.train.values():
            inputs = [each for each in compiled.finished.inputs if each.kind == "batch"]
            for whole, part in zip(step.split(batch), step.split(outline)):
                fed = [[step.value(each, rank, BatchLayout(compiled.finished, half), {}) for each in inputs] for half in (whole, part)]
                assert all(torch.equal(a, b) for a, b in zip(*fed))


@pytest.mark.parametrize(("mesh", "rows", "microbatches"), MESHES.values(), ids=MESHES)
@pytest.mark.sample(2)
def test_ranks_count_the_labels_of_each_sample_once(mesh, rows, microbatches):
    batch = batches(rows=rows)[0]
    for number, labels in enumerate(batch["labels"]):
        labels[number:] = -100
    step = compile_lockstep(llama(n_layers=2), llama_loss, batch, mesh, microbatches=microbatches, lower={"backend": "eager"})
    whole, labelled = step.counts(batch), int((batch["labels"] >= 0).sum())
    assert {name: int(count) for name, count in whole.items()} == ({"count_0": labelled} if microbatches > 1 else {})
    shares = []
    for rank in range(step.mesh.world_size):  # of the first stage
        place = step.mesh.coordinates(rank)
        if not any(place.get(axis) for axis in ("cp", "tp")):
            step.ranks = (rank,)
            step.samples = step.own_samples()
            outline = {name: value.clone() for name, value in batch.items()}
            outline["labels"][np.setdiff1d(np.arange(rows), step.samples)] = 3
            shares.append((step.counts(outline), step.total((batch["labels"] >= 0).sum(1))))
    assert sum(count for _, count in shares) == labelled > rows
    for name, count in whole.items():
        assert sum(counts[name] for counts, _ in shares) == count
