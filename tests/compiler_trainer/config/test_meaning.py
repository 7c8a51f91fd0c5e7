"""What `--help GROUP` prints is what the schema says, of every option."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console

from compiler_trainer import UserError
from compiler_trainer.config.meaning import explain, groups
from compiler_trainer.config.schema import Config


def said(asked: str) -> str:
    out = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    explain(asked, out)
    return out.export_text()


def test_every_option_is_there_with_its_default():
    found = {option.name: option for group in groups() for option in group.options}
    for group in ("train", "optim", "mesh", "checkpoint", "eval", "run", "lr_schedule"):
        names = {f"{group}.{field.name}" for field in dataclasses.fields(getattr(Config(), group))}
        assert names <= found.keys()
    assert found["optim.betas"].default == "[0.9, 0.999]" and found["optim.max_norm"].default == "null"
    assert found["passes.remat.policy"].takes.startswith("none | full") and found["optim.state"].takes == "float32 | bfloat16 | null"
    assert found["train.steps"].takes == "int, at least 1"


def test_a_group_an_option_and_all_of_them():
    assert "choices: adamw, adamw8bit" in said("optim") and "of updated bf16 parameters" in said("optim")
    alone = said("optim.eps")
    assert "optim.eps" in alone and "optim.lr" not in alone
    assert "passes.remat.policy" in said("passes") and "mesh.tp" in said("")


def test_what_there_is_not_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="'optim.lr'"):
        explain("optim.lrr", Console())
