"""Lines before compilation: a description of the run, and notes on probable mistakes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiler_trainer.config.device import for_running
from compiler_trainer.config.schema import (
    CastConfig,
    Config,
    FolderConfig,
    LrScheduleConfig,
    MeshConfig,
    OptimConfig,
    PassesConfig,
    TrainConfig,
)
from compiler_trainer.models.subject import subject
from compiler_trainer.training import preflight

CFG = Config(mesh=MeshConfig(dp_shard=1), train=TrainConfig(steps=100, seq_len=8, global_batch_size=4, microbatches=2))


def test_model_precision_update_and_step_are_told():
    cfg = replace(CFG, passes=PassesConfig(cast=CastConfig(param_dtype="bfloat16")), optim=OptimConfig(lr=3e-4))
    batch = {"tokens": torch.zeros(1, 4), "labels": torch.tensor([[1, 2, -100, -100]])}
    model, update, step = preflight.describe(cfg, subject(cfg), batch)
    assert model == "model: llama_debug, 3,279,616 parameters; computed in bfloat16, master weights in float32"
    assert update == "update: adamw, learning rate 0.0003, constant; 100 steps"
    assert step.startswith("a step: 32 tokens (4 rows of 8) in 2 microbatches (gradient accumulation); 50.0% of the tokens")


def test_parts_of_ones_own_are_told_by_name():
    schedule = LrScheduleConfig("custom", _target_="my.schedule")
    cfg = replace(CFG, optim=OptimConfig("custom", lr=3e-4, _target_="my.Lion"), lr_schedule=schedule)
    _, update, step = preflight.describe(cfg, subject(cfg), {"image": torch.zeros(4, 3, 8), "labels": torch.zeros(4)})
    assert update == "update: my.Lion, learning rate 0.0003 times my.schedule; 100 steps"
    assert step.startswith("a step: image [4, 3, 8], labels [4]; on one ")


def changed(**groups):
    return replace(CFG, **{name: replace(getattr(CFG, name), **values) for name, values in groups.items()})


WEIGHTS = FolderConfig(path="somewhere")


@pytest.mark.parametrize(("cfg", "check", "message"), [
    (CFG, preflight.padding_ranks, ""),
    (changed(mesh={"dp_shard": 8}), preflight.padding_ranks, "the 2 rows of a microbatch (4 in 2 parts) do not divide among 8 data ranks: 75% of their "
     "work is padding; set train.global_batch_size to a multiple of 16"),
    (changed(mesh={"dp_shard": 8}, train={"global_batch_size": 12, "microbatches": 1}), preflight.padding_ranks,
     "the 12 rows of a step do not divide among 8 data ranks: 25% of their work is padding; set train.global_batch_size to a multiple of 8"),
    (replace(CFG, model=WEIGHTS), preflight.high_rate, "optim.lr=0.001 is for training from scratch, and somewhere has trained weights; set "
     "optim.lr=1e-5, as recipe=finetune has"),
    (replace(CFG, model=WEIGHTS, optim=OptimConfig(lr=1e-5)), preflight.high_rate, ""),
    (replace(CFG, model=replace(WEIGHTS, init="random")), preflight.high_rate, ""),
    (CFG, preflight.high_rate, ""),
    (CFG, preflight.pure_bfloat16, ""),
    (changed(train={"dtype": "bfloat16"}), preflight.pure_bfloat16, "train.dtype=bfloat16 keeps no float32 master weights and rounds small updates away; set "
     "passes.cast.param_dtype=bfloat16 instead for mixed precision, or optim.stochastic_rounding=true"),
], ids=lambda value: getattr(value, "__name__", None))
def test_settings_that_are_hardly_meant_have_a_line(cfg, check, message):
    assert check(cfg) == message


def test_a_run_made_for_gpus_has_a_line_on_cpus(monkeypatch):
    monkeypatch.setattr(preflight.torch, "get_num_threads", lambda: 2)
    cfg = for_running(changed(train={"steps": 500, "seq_len": 2048, "global_batch_size": 32}))
    trained = replace(subject(cfg), flops_per_token=lambda seq_len: 600_000 * seq_len)
    assert preflight.slow_run(cfg, trained) == (  # 2048 x 32 tokens of 1.2288e9 FLOPs at 2e11 a second
        "on 2 CPU cores a step takes at least 0:06:43 and the run 2 days, 7:55:27; for a trial set train.seq_len=128 "
        "train.global_batch_size=8 train.steps=30")
    assert preflight.slow_run(replace(cfg, train=replace(cfg.train, steps=20)), trained) == ""
    monkeypatch.setattr(preflight, "device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert preflight.slow_run(cfg, trained) == ""
