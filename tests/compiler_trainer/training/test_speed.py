"""Throughput, and its share of a GPU's peak."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from compiler_trainer.config.device import resolve_auto
from compiler_trainer.config.schema import Config, MeshConfig, ModelConfig
from compiler_trainer.models.subject import subject
from compiler_trainer.training.preflight import default_job
from compiler_trainer.training.speed import machine, speed

CFG = replace(Config(), mesh=MeshConfig(dp_shard=4))


def test_flops_are_those_of_one_rank():
    result = speed(CFG, flops_per_token=10**6, tokens=4000, step_s=0.5)
    assert result == {"tokens_per_s": 8000, "step_ms": 500.0, "tflops": pytest.approx(8000 / 4 * 1e6 / 1e12)}


def test_images_are_those_of_all_rows():
    cfg = replace(CFG, train=replace(CFG.train, global_batch_size=6), data=replace(CFG.data, images_per_row=2))
    assert speed(cfg, flops_per_token=10**6, tokens=4000, step_s=0.5)["images_per_s"] == 24


def test_mfu_is_of_the_gpu_that_the_cluster_describes(monkeypatch):
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "NVIDIA H100 80GB HBM3"))
    cfg = resolve_auto(CFG, on_gpu=True)
    result = speed(cfg, 10**6, 4000, 0.5)
    assert result["mfu"] == pytest.approx(result["tflops"] / 989.0)  # bf16
    other = replace(cfg, cluster=replace(cfg.cluster, device="NVIDIA H200"))
    assert "mfu" not in speed(other, 10**6, 4000, 0.5)


def test_the_machine_is_named():
    assert {"processor", "GPU", "versions"} == machine().keys() and torch.__version__ in machine()["versions"]


def test_a_large_model_on_debug_settings_is_noted():
    large = replace(Config(), model=ModelConfig(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192))
    assert "recipe=llama3_8b" in default_job(large, subject(large))
    assert not default_job(Config(), subject(Config()))
    assert not default_job(replace(large, data=replace(large.data, name="text")), subject(large))
