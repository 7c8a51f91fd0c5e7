"""Averages of weights equal those of a plain loop, on any mesh, through checkpoints and exports."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from commands import call
from oracle import compile_lockstep, perceptron, points, squared_error
from safetensors.torch import load_file
from short_runs import options, resuming

from compiler_trainer import checkpoint
from compiler_trainer.config.errors import UserError
from compiler_trainer.models.subject import subject
from compiler_trainer.training import averages, trainer
from compiler_trainer.training.callbacks import Callback
from compiler_trainer.training.prepare import read_data
from compiler_trainer.training.trainer import peek


class Weights(Callback):
    """A callback that keeps the weights before the first step and after each step."""

    def __init__(self):
        self.seen = []

    def on_start(self, run):
        self.seen.append(run.state_dict())

    def on_step(self, run, record):
        self.seen.append(run.state_dict())


def plainly(seen, ema):
    """Return the averages of a plain loop."""
    result = {name: value.clone() for name, value in seen[0].items()}
    for weights in seen[1:]:
        result = {name: ema * value + (1 - ema) * weights[name] for name, value in result.items()}
    return result


def test_they_are_those_of_a_plain_loop():
    data, model = points(), perceptron()
    step = compile_lockstep(model, squared_error, data[0], {"dp_shard": 2, "tp": 2})
    seen, yes, no = [step.state_dict()], torch.tensor(True), torch.tensor(False)
    averages.add(step, (name for name, p in model.named_parameters() if p.requires_grad))
    for number, batch in enumerate(data):
        step(batch)
        seen.append(step.state_dict())
        averages.follow(step, 0.75, yes if number else None)
    step(data[0])
    averages.follow(step, 0.75, no)  # its update was skipped
    result, expected = step.wholes("ema."), plainly(seen, 0.75)
    del expected["frozen"]
    assert {name.removeprefix("ema.") for name in result} == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(result[f"ema.{name}"], value, rtol=0, atol=1e-12)
        assert name == "unused" or not torch.equal(value, seen[-1][name])


@pytest.mark.full
def test_a_run_that_is_interrupted_keeps_them_and_exports_them(tmp_path):
    cfg = options(tmp_path / "whole", steps=4)
    cfg = replace(cfg, train=replace(cfg.train, ema=0.5))
    weights = Weights()
    trainer.train(cfg, callbacks=[weights])
    expected = plainly(weights.seen, 0.5)
    cut = resuming(replace(cfg, run=replace(cfg.run, dir=str(tmp_path / "cut"))), tmp_path / "whole/checkpoints/step_00000002")
    trainer.train(cut)
    result = checkpoint.read_averaged(tmp_path / "cut/checkpoints/step_00000004")
    assert result.keys() == expected.keys()
    assert all(torch.allclose(result[name], value, rtol=0, atol=1e-6) for name, value in expected.items())
    assert call("export", tmp_path / "cut", tmp_path / "out", "--ema") == 0
    exported = load_file(tmp_path / "out/model.safetensors")
    assert torch.allclose(exported["lm_head.weight"], expected["output.weight"], rtol=0, atol=1e-6)
    assert not torch.allclose(exported["lm_head.weight"], weights.seen[-1]["output.weight"], rtol=0, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, {"pp": 2}], ids=str)
def test_they_are_read_into_weights_of_any_mesh_and_of_a_narrower_dtype(mesh, tmp_path, monkeypatch):
    cfg = options(tmp_path / "run", steps=2)
    cfg = replace(cfg, train=replace(cfg.train, ema=0.5, dtype="bfloat16"), model=replace(cfg.model, n_layers=2))
    trainer.train(cfg)
    path, result = tmp_path / "run/checkpoints/step_00000002", subject(cfg)
    batch, rest = peek(read_data(cfg).train), {"microbatches": 2, "initial": result.initial(), "lower": cfg.lower}
    step = compile_lockstep(result.module, result.loss, batch, mesh, **rest)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda x, **how: torch.full_like(x, float("nan"), **how))
        checkpoint.load_averaged(step, path)
    assert all(local.isfinite().all() for state in step.state.values() for local in state.local.values())  # padding, too
    expected, weights = checkpoint.read_averaged(path), checkpoint.read_model(path)
    assert expected["output.weight"].dtype == torch.bfloat16 and not torch.equal(expected["output.weight"], weights["output.weight"])
    assert step.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in step.state_dict().items())


def test_they_begin_at_the_weights_of_a_checkpoint_without_any(tmp_path):
    cfg = options(tmp_path / "run", steps=2)
    trainer.train(cfg)
    with pytest.raises(UserError, match="^--ema: .* has no averages of weights; train with train.ema="):
        checkpoint.read_averaged(tmp_path / "run/checkpoints/step_00000002")
    further, weights = replace(cfg, train=replace(cfg.train, steps=3, ema=0.9)), Weights()
    trainer.train(resuming(further, "latest"), callbacks=[weights])
    result = checkpoint.read_averaged(tmp_path / "run/checkpoints/step_00000003")
    for name, value in plainly(weights.seen, 0.9).items():
        torch.testing.assert_close(result[name], value, rtol=0, atol=1e-6)
