"""Names of other trainers: each is answered, with options that there are."""

from __future__ import annotations

import re

import pytest

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.foreign import ANSWERS, VALUES, answer
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import Config
from compiler_trainer.training.compare import leaves


def options() -> set[str]:
    import dataclasses

    named = {name for name, _ in leaves(dataclasses.asdict(Config()))}
    lora = {f"model.lora.{name}" for name in ("rank", "alpha", "dropout", "targets")}
    return named | lora | {"model.path", "model.lora", "loss._target_", "recipe", "optim.groups"}


@pytest.mark.parametrize("said", sorted({*ANSWERS.values(), *VALUES.values()}))
def test_every_option_that_an_answer_names_exists(said):
    groups = ("train", "optim", "lr_schedule", "data", "mesh", "passes", "lower", "checkpoint", "eval", "run", "model", "loss", "cluster")
    for name in re.findall(rf"\b(?:{'|'.join(groups)})\.[a-z_.0-9]*[a-z_0-9]", said):
        assert name in options() or any(known.startswith(f"{name}.") for known in options()), name


@pytest.mark.parametrize(("given", "said"), [
    ({"train": {"gradient_accumulation_steps": 4}}, "train.gradient_accumulation_steps: no such option; gradient accumulation is train.microbatches"),
    ({"train": {"bf16": True}}, "mixed precision is passes.cast.param_dtype=bfloat16"),
    ({"train": {"lr": 1e-4}}, "train.lr: no such option; the learning rate is optim.lr"),
    ({"learning_rate": 1e-4}, "learning_rate: no such option; the learning rate is optim.lr"),
    ({"wandb": True}, "wandb: no such option; metrics go to metrics.jsonl, TensorBoard and run.loggers="),
    ({"model": {"attn_implementation": "sdpa"}}, "kernels are chosen automatically"),
    ({"train": {"dtype": "bf16"}}, "did you mean 'bfloat16'?; it is of the master weights; mixed precision is passes.cast.param_dtype"),
    ({"passes": {"cast": {"float8": "mxfp8"}}}, "'mxfp8' is not one of tensorwise, rowwise; there is no MXFP8 and no NVFP4"),
    ({"passes": {"cast": {"nvfp4": True}}}, "passes.cast.nvfp4: no such option; there is no MXFP8 and no NVFP4"),
    ({"passes": {"moe": {"fp8_grouped_mm": True}}}, "no such option; products of experts are not taken in float8"),
    ({"passes": {"moe": {"dispatch": "exact"}}}, "'exact' is not one of auto, all_gather, dropless, bounded; counts of rows stay"),
    ({"train": {"stepz": 4}}, "train.stepz: no such option; did you mean 'steps'?"),
])
def test_a_name_of_another_trainer_is_answered_where_it_is_refused(given, said):
    with pytest.raises(UserError) as refused:
        build(Config, given)
    assert said in str(refused.value)


def test_case_hyphens_and_groups_do_not_matter():
    assert answer("train.Per-Device-Train-Batch-Size") == ANSWERS["per_device_train_batch_size"]
    assert answer("optim.lrr") is None
