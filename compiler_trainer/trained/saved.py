"""A run folder as a command finds it: its options, some of them given anew, and its newest checkpoint."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from torch import nn

from compiler_trainer import checkpoint
from compiler_trainer.config import schema
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import did_you_mean
from compiler_trainer.config.schema import Config
from compiler_trainer.models.skeleton import fill
from compiler_trainer.models.subject import Subject, subject
from compiler_trainer.training.resume import first_whole

T = TypeVar("T")


def options_of(run: Path, overrides: Sequence[str], conf: Path) -> Config:
    """The options of the run in a folder, those of `overrides` given anew; `conf` holds the choices of groups.

    `data=text` takes the whole group anew, but for the tokenizer, which is the model's; `data.seed=1` takes one option.
    Raises UserError naming the override at fault.
    """
    if not os.path.lexists(run / "config.yaml"):
        raise UserError(str(run), "is no run folder: it has no config.yaml")
    saved = dataclasses.asdict(schema.load(run / "config.yaml"))
    saved["run"]["dir"] = str(run)
    saved["checkpoint"] |= {"resume": None, "allow": ()}  # these were for its own start
    given = OverridesParser.create().parse_overrides(list(overrides))
    for override in given:
        if override.is_sweep_override() or override.is_delete() or str(override.input_line).startswith("~"):
            raise UserError(str(override.input_line), "is for a new run; here an override gives one option one value")
    groups = {str(o.key_or_group) for o in given if (conf / str(o.key_or_group)).is_dir()}
    anew = [str(o.input_line) for o in given if str(o.key_or_group).split(".")[0] in groups]
    composed: Any = compose(conf, [f"data.tokenizer={saved['data']['tokenizer']}", *anew]) if anew else {}
    options = OmegaConf.create(saved | {group: composed[group] for group in groups})
    for override in given:
        key = override.get_key_element().lstrip("+")
        if key.split(".")[0] not in options:
            raise UserError(key, f"no such option{did_you_mean(key, [str(name) for name in options])}")
        if key.split(".")[0] not in groups:
            OmegaConf.update(options, key, override.value(), merge=True, force_add=True)
    return schema.build(Config, OmegaConf.to_container(options, resolve=True))


def compose(conf: Path, overrides: list[str]) -> dict[Any, Any]:
    """What hydra makes of the default job and some overrides."""
    with hydra.initialize_config_dir(str(conf), version_base="1.3"):
        composed = OmegaConf.to_container(hydra.compose("train", overrides), resolve=True, throw_on_missing=True)
    assert isinstance(composed, dict)
    return composed


def from_newest(cfg: Config, action: Callable[[Path], T]) -> T | None:
    """What `action` gives for the newest whole checkpoint of a run, or for the one that `checkpoint.resume` names."""
    result, _ = first_whole(going_on(cfg, "latest"), action)
    return result


def going_on(cfg: Config, resume: str) -> Config:
    """The run from the checkpoint that it names on; where it names none, from `resume`."""
    resume = cfg.checkpoint.resume or resume
    return dataclasses.replace(cfg, checkpoint=dataclasses.replace(cfg.checkpoint, resume=resume))


def trained_model(cfg: Config) -> tuple[Subject, nn.Module]:
    """What was trained, and the module itself with the values of its newest checkpoint, in eval mode, on the CPU."""
    found = subject(cfg)
    values = from_newest(cfg, checkpoint.read_model)
    assert values is not None
    if any(name not in values for name, _ in found.module.named_parameters()):  # frozen ones, kept elsewhere
        values = {name: value[()] for name, value in found.initial() if name not in values} | values
    return found, fill(found.module, values.items()).eval()
