"""Recipes set the options that each of them must set, and a command line with one trains the named model."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import CONF
from compiler_trainer.config.schema import AUTOMATIC, is_open, open_axes, with_placeholders
from compiler_trainer.config.validate import validate
from compiler_trainer.models.windowed import WindowedDecoder

RECIPES = sorted(path.stem for path in Path(CONF, "recipe").glob("*.yaml"))
ONE_GPU = ("windowed_50m",)  # these set batch, split and learning rate themselves


def needs_folder(name):
    """Return True if a recipe trains the model of a folder."""
    try:
        compose([f"recipe={name}"])
    except UserError as error:
        return error.place == "model.path"
    return False


TUNING = [name for name in RECIPES if needs_folder(name)]
SHAPED = [name for name in RECIPES if name not in (*TUNING, *ONE_GPU, "pretrain")]


def job(name, *overrides):
    return to_config(compose([f"recipe={name}", *(["model.path=somewhere"] if name in TUNING else []), *overrides]))


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ONE_GPU])
@pytest.mark.sample(2)
def test_each_computes_as_the_device_can_and_plans_its_accumulation(name):
    cfg = job(name)
    assert (cfg.passes.cast.param_dtype, cfg.passes.cast.reduce_dtype) == ("auto", "float32")
    if name != "embed":  # whose negatives are those of a whole batch
        assert is_open(cfg) and cfg.train.microbatches == AUTOMATIC
    assert cfg.train.dtype == "float32" and cfg.optim.lr < 1e-3
    assert 0 < cfg.lr_schedule.warmup(cfg.train.steps) < cfg.train.steps or cfg.lr_schedule.name == "constant"


@pytest.mark.parametrize("name", [*SHAPED, *ONE_GPU, "pretrain"])
@pytest.mark.sample(2)
def test_pretraining_needs_a_tokenizer_and_a_dry_run_does_not(name):
    with pytest.raises(UserError, match="^data.tokenizer: is empty, .* set data.tokenizer=FOLDER/tokenizer.json"):
        validate(with_placeholders(job(name)), 8)
    validate(with_placeholders(job(name, "run.dry=true")), 8)
    validate(with_placeholders(job(name, "data=text", "data.files=[books]", "data.tokenizer=TOK")), 8)


@pytest.mark.parametrize("name", SHAPED)
@pytest.mark.sample(2)
def test_each_has_the_model_of_its_name(name):
    assert job(name).model.name == name


def test_the_small_model_has_the_parameters_of_its_name():
    assert sum(p.numel() for p in WindowedDecoder().parameters()) == 50_331_664


def test_what_is_stated_is_kept_and_the_rest_of_the_mesh_is_planned():
    assert open_axes(job("llama3_8b", "mesh.tp=2").mesh) == ["dp_replicate", "dp_shard", "cp"]


@pytest.mark.parametrize(("steps", "warmup"), [(1_200_000, 8000), (3000, 20), (30, 0)])
def test_warm_up_follows_the_length_of_a_run(steps, warmup):
    assert job("llama3_8b", f"train.steps={steps}").lr_schedule.warmup(steps) == warmup


@pytest.mark.parametrize(("overrides", "lr"), [
    ([], 1e-5), (["+model.lora.rank=4"], 2e-4), (["model.init=random"], 1e-3), (["optim.lr=3e-5"], 3e-5),
])
def test_trained_weights_have_a_learning_rate_of_their_own(overrides, lr):
    assert to_config(compose(["model=hf", "model.path=somewhere", *overrides])).optim.lr == lr
