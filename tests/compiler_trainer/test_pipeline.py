"""Configuration in, passes out: what each option adds or leaves out, in an order that holds."""

from __future__ import annotations

import pytest
import torch

from compiler_trainer.config.schema import CastConfig, CommunicationConfig, OptimConfig, PassesConfig, RematConfig
from compiler_trainer.pipeline import build_pipeline
from passes.check.runner import check_order
from passes.program.stages import Stage
from passes.update.optimizers import SGD, AdamW

MASTERS = {"w": torch.float32}


def named(steps):
    return {step.name: step for step in steps}


@pytest.mark.parametrize("microbatches", [1, 3])
def test_every_program_is_in_an_order_that_holds(microbatches):
    pipeline = build_pipeline(PassesConfig(CastConfig(None)), OptimConfig(), MASTERS, microbatches)
    check_order(pipeline.forward, Stage.CAPTURED)
    for steps in (pipeline.evaluate, *pipeline.branches().values()):
        check_order(steps, Stage.LOCAL)
        assert [step.name for step in steps[-2:]] == ["overlap", "segment"]


def test_a_pass_before_what_it_needs_is_refused():
    pipeline = build_pipeline(PassesConfig(CastConfig(None)), OptimConfig(), MASTERS, 1)
    with pytest.raises(ValueError, match="pass 'shard' takes a placed program, not a captured one: it comes too early"):
        check_order(tuple(reversed(pipeline.forward)), Stage.CAPTURED)


def test_microbatches_split_the_step():
    one, three = (build_pipeline(PassesConfig(CastConfig(None)), OptimConfig(), MASTERS, n) for n in (1, 3))
    assert list(one.train) == ["step"] and list(three.train) == ["accumulate", "apply"]
    assert "optimize" not in named(three.train["accumulate"])
    assert named(three.train["apply"])["optimize"].scale == pytest.approx(1 / 3)


def test_options_reach_their_passes():
    passes = PassesConfig(cast=CastConfig(None, "float32"), remat=RematConfig("full", False),
                          communication=CommunicationConfig(0.5))
    found = build_pipeline(passes, OptimConfig("sgd", momentum=0.9, max_norm=2.0), MASTERS, 1)
    step = named(found.train["step"])
    assert (step["remat"].policy, step["remat"].regather) == ("full", False)
    assert step["bucket"].bucket_mib == 0.5
    assert (step["optimize"].optimizer, step["optimize"].max_norm) == (SGD(0.9, 0.0), 2.0)
    assert step["optimize"].reduce_dtype == named(found.forward)["shard"].reduce_dtype == torch.float32


def test_adamw_is_the_default():
    found = build_pipeline(PassesConfig(CastConfig(None)), OptimConfig(), MASTERS, 1).train["step"]
    assert isinstance(named(found)["optimize"].optimizer, AdamW)
