"""`--help GROUP` prints the schema's description of every option."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from compiler_trainer import UserError
from compiler_trainer.config.compose import compose
from compiler_trainer.config.descriptions import explain, groups, recipes
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import Config


def help_text(query: str) -> str:
    return "\n".join(explain(query, 160))


def test_every_option_is_there_with_its_default():
    options = {option.name: option for group in groups() for option in group.options}
    for group in ("train", "optim", "mesh", "checkpoint", "eval", "run", "lr_schedule"):
        names = {f"{group}.{field.name}" for field in dataclasses.fields(getattr(Config(), group))}
        assert names <= options.keys() | {inner.name for inner in groups()}
    assert options["optim.betas"].default == "[0.9, 0.95]" and options["optim.max_norm"].default == "1.0"
    assert options["train.steps"].default == "400" and options["lr_schedule.name"].default == "cosine"
    assert options["passes.remat.policy"].takes.startswith("none | full") and options["optim.state"].takes == "float32 | bfloat16 | null"
    assert options["train.steps"].takes == "a whole number, at least 1 | 3epochs | 20Btokens"


def test_what_an_option_takes_is_in_words():
    takes_of = {option.name: option.takes for group in groups() for option in group.options}
    expected = {
        "optim.betas": "list of 2, each a number, 0 or more and below 1",
        "optim.groups": "by name: {kinds, names, lr, weight_decay, optimizer}",
        "passes.cast.ops": "by name: float32 | bfloat16",
        "plan.recompute": "list of none | selective | attention | full",
        "data.files": "list of text",
        "data.document_separator": "text, at least one character | null",
        "data.chat": "true or false",
        "run.time_limit": "seconds, or 2h30m | null",
    }
    assert {name: takes_of[name] for name in expected} == expected
    assert not [name for name, takes in takes_of.items() if not takes or re.search(r"[A-Z][a-z]+[A-Z]|tuple|dict\[|str\b|bool|None", takes)]


def test_a_group_an_option_and_all_of_them():
    assert "choices: adamw, adamw8bit" in help_text("optim") and "of updated bf16" in help_text("optim")
    of_eps = help_text("optim.eps")
    assert "optim.eps" in of_eps and "optim.lr" not in of_eps
    assert "passes.remat.policy" in help_text("passes") and "mesh.tp" in help_text("")


def test_every_default_that_is_shown_is_that_of_the_job():
    job = build(Config, compose())
    for option in (option for group in groups() for option in group.options if option.name != "run.dir"):
        value, names = job, option.name.split(".")
        for part in names:
            value = getattr(value, part, None)
        if value is not None and names[0] not in ("model", "data", "cluster"):
            assert option.default == (value if isinstance(value, str) else json.dumps(value, default=vars)), option.name


@pytest.mark.parametrize(("query", "name"), [
    ("accumulation", "train.microbatches"),
    ("gradient accumulation", "train.microbatches"),
    ("gradient_accumulation", "train.microbatches"),
    ("mixed precision", "passes.cast.param_dtype"),
    ("FSDP", "mesh.dp_shard"),
    ("clip", "optim.max_norm"),
    ("activation checkpointing", "passes.remat.policy"),
    ("epochs", "train.steps"),
    ("offload", "passes.remat.policy"),
    ("ulysses", "passes.context.method"),
    ("finetune", "recipe=finetune"),
])
@pytest.mark.sample(2)
def test_options_are_found_by_the_words_of_the_field(query, name):
    assert name in help_text(query)


@pytest.mark.parametrize(("query", "message"), [
    ("bf16", "bf16: mixed precision is train.precision=bf16"), ("wandb", "wandb: metrics go to metrics.jsonl, TensorBoard and run.loggers=[wandb]"),
    ("yarn", "yarn: scaling of positions: it is a config.json's"), ("freeze", "freeze: a learning rate of 0 freezes weights"),
    ("liger", "liger: kernels come from Inductor"), ("slurm", "srun compiler-trainer"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps: gradient accumulation is train.microbatches"),
])
@pytest.mark.sample(2)
def test_another_trainers_word_is_answered(query, message):
    assert message in " ".join(help_text(query).split())


def test_an_option_of_training_shows_its_type_default_and_meaning():
    assert "gradient accumulation" in help_text("train.microbatches") and "a whole number, at least 1 | auto" in help_text("train.microbatches")


def test_no_option_and_no_recipe_lacks_a_description():
    assert not [option.name for group in [*groups(), recipes()] for option in group.options if not option.meaning]


def test_recipes_are_listed():
    assert "recipe=finetune\n      Supervised fine-tuning (SFT)" in help_text("recipe") and "recipe=qlora" in help_text("4 bits")


@pytest.mark.parametrize("query", ["", "optim", "cluster", "recipe", "bf16"])
def test_help_fits_a_terminal(query):
    assert not [line for line in explain(query, 80) if len(line) > 80]


def test_what_there_is_not_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="'optim.lr'"):
        list(explain("optim.lrr", 80))
