"""GPU features as far as they can be tested without a GPU: TF32, memory snapshots, the flight recorder."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from compiler_trainer.config.options import build
from compiler_trainer.config.schema import Config
from compiler_trainer.step import ranks
from compiler_trainer.training import trainer
from compiler_trainer.training.preflight import precision


def described_precision(monkeypatch, on_gpu, chosen="highest", **cast):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: chosen)
    return precision(build(Config, {"train": {"dtype": "float32"}, "passes": {"cast": {"param_dtype": None, **cast}}}))


def test_a_run_in_float32_on_a_gpu_says_whether_products_are_in_tf32(monkeypatch):
    assert described_precision(monkeypatch, False) == "float32 throughout"
    assert described_precision(monkeypatch, True).startswith("float32 throughout, matmuls not rounded to TF32 (")
    assert "matmuls rounded to TF32 (torch.set_float32_matmul_precision is 'high')" in described_precision(monkeypatch, True, "high")
    assert "TF32" not in described_precision(monkeypatch, True, param_dtype="bfloat16")


@pytest.mark.parametrize("fails", [False, True])
def test_a_memory_snapshot_is_written_whatever_ends_a_run(fails, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(trainer, "record_allocations", lambda: done.append("record"))
    monkeypatch.setattr(trainer, "dump_allocations", done.append)
    try:
        with trainer.allocations(build(Config, {"run": {"memory_snapshot": True, "dir": str(tmp_path)}})):
            if fails:
                raise MemoryError
    except MemoryError:
        assert fails
    assert done == ["record", tmp_path / "memory_0.pickle"]


def test_no_memory_snapshot_is_taken_unasked(monkeypatch):
    monkeypatch.setattr(trainer, "record_allocations", lambda: pytest.fail("recorded"))
    with trainer.allocations(Config()):
        pass


@pytest.mark.parametrize(("variable", "size"), [(None, "2000"), ("7", "7")])
def test_the_flight_recorder_is_on_in_jobs_on_gpus_unless_it_was_set(variable, size, monkeypatch):
    monkeypatch.setattr(os, "environ", {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"} | ({"TORCH_FR_BUFFER_SIZE": variable} if variable else {}))
    for name, value in {"is_available": lambda: True, "set_device": lambda number: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    begun = []
    monkeypatch.setattr(ranks, "meeting", lambda: (dist.HashStore(), None, 0, 1))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: begun.append((backend, os.environ["TORCH_FR_BUFFER_SIZE"])))
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    assert ranks.start_ranks() == 1 and begun == [("nccl", size)]
