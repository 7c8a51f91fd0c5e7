"""The pipeline of a config: the passes that each option adds or removes, in a valid order."""

from __future__ import annotations

import pytest
import torch
from pipelines import pipeline_of

from compiler_trainer.config.schema import CastConfig, CommunicationConfig, OptimConfig, PassesConfig, RematConfig
from passes.check.runner import check_order
from passes.ir.stages import Stage
from passes.update.optimizers import SGD, AdamW


def named(steps):
    return {step.name: step for step in steps}


@pytest.mark.parametrize("microbatches", [1, 3])
def test_every_program_is_in_an_order_that_holds(microbatches):
    pipeline = pipeline_of(microbatches=microbatches)
    check_order(pipeline["forward"].passes, Stage.CAPTURED)
    for steps in (pipeline["evaluate"].passes, *pipeline.training().values()):
        check_order(steps, Stage.LOCAL)
        assert [step.name for step in steps[-2:]] == ["overlap", "segment"]


def test_a_pass_before_what_it_needs_is_refused():
    pipeline = pipeline_of()
    with pytest.raises(ValueError, match="pass 'shard' takes a placed program, not a captured one: it comes too early"):
        check_order(tuple(reversed(pipeline["forward"].passes)), Stage.CAPTURED)


def test_microbatches_split_the_step():
    one, three = (pipeline_of(microbatches=n) for n in (1, 3))
    assert list(one.training()) == ["step"] and list(three.training()) == ["accumulate", "apply"]
    assert "optimize" not in named(three["accumulate"].passes)
    assert named(three["apply"].passes)["optimize"].scale == pytest.approx(1 / 3)


def test_options_reach_their_passes():
    passes = PassesConfig(cast=CastConfig(None, "float32"), remat=RematConfig("full", False),
                          communication=CommunicationConfig(0.5))
    pipeline = pipeline_of(passes, optim=OptimConfig("sgd", momentum=0.9, max_norm=2.0))
    step = named(pipeline["step"].passes)
    assert (step["remat"].policy, step["remat"].regather) == ("full", False)
    assert step["bucket"].bucket_mib == 0.5
    assert (step["optimize"].optimizer, step["optimize"].max_norm) == (SGD(0.9, 0.0), 2.0)
    assert step["optimize"].reduce_dtype == named(pipeline["forward"].passes)["shard"].reduce_dtype == torch.float32


def test_adamw_is_the_default():
    pipeline = pipeline_of()["step"].passes
    assert isinstance(named(pipeline)["optimize"].optimizer, AdamW)
