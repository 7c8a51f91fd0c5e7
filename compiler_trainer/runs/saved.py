"""A run folder for commands: its options with overrides, and its newest checkpoint."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf
from torch import nn

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import Damaged
from compiler_trainer.config import schema, short_names
from compiler_trainer.config.compose import as_user_errors, compose
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import CONF
from compiler_trainer.config.jobs import quoted
from compiler_trainer.config.options import unknown
from compiler_trainer.config.schema import Config
from compiler_trainer.models.skeleton import fill
from compiler_trainer.models.subject import Subject, model_of
from compiler_trainer.training.checkpoints import checkpoints_of, first_whole

T = TypeVar("T")


def options_of(run: Path, overrides: Sequence[str]) -> Config:
    """Return the options of the run in a folder, with `overrides` applied.

    `data=text` replaces the whole group except the tokenizer, which is the model's; `data.seed=1` replaces one option.
    Raises UserError naming the override at fault.
    """
    if not os.path.lexists(run / "config.yaml"):
        raise UserError(str(run), "is no run folder: it has no config.yaml")
    checkpoint.check_format(run / "checkpoints")  # before the options, whose names differ in older versions
    saved = dataclasses.asdict(schema.load(run / "config.yaml"))
    saved["run"]["dir"] = str(run)
    saved["checkpoint"] |= {"resume": None, "allow": ()}  # these apply only to the run's own start
    with as_user_errors():
        readable = [quoted(override) for override in short_names.replaced(overrides)]
        return with_overrides(saved, OverridesParser.create().parse_overrides(readable))


def with_overrides(saved: dict[str, Any], overrides: Sequence[Override]) -> Config:
    """Return the options with overrides applied; raise UserError naming the override at fault."""
    for override in overrides:
        if override.is_sweep_override() or override.is_delete() or str(override.input_line).startswith("~"):
            raise UserError(str(override.input_line), "is only for a new run; an override here sets one option")
    groups = {str(o.key_or_group) for o in overrides if (CONF / str(o.key_or_group)).is_dir()}
    if unsaved := sorted(groups - saved.keys()):
        raise UserError(unsaved[0], "is only for a new run; an override here sets one option")
    group_overrides = [str(o.input_line) for o in overrides if str(o.key_or_group).split(".")[0] in groups]
    composed: Any = compose(["data.tokenizer=bytes", *group_overrides]) if group_overrides else {}
    if "data" in groups and not any(override.get_key_element() == "data.tokenizer" for override in overrides):
        composed["data"]["tokenizer"] = saved["data"]["tokenizer"]
    options = OmegaConf.create(saved | {group: composed[group] for group in groups})
    changed = []
    for override in overrides:
        key = override.get_key_element().lstrip("+")
        if key.split(".")[0] not in options:
            raise UserError(key, unknown(key, [str(name) for name in options]))
        if key.split(".")[0] not in groups:
            OmegaConf.update(options, key, override.value(), merge=True, force_add=True)
            changed.append(key)
    resolved = {key: OmegaConf.select(options, key) for key in changed}  # saved options are already resolved
    for key, value in resolved.items():
        OmegaConf.update(options, key, value, merge=True, force_add=True)
    return schema.build(Config, OmegaConf.to_container(options, resolve=False))


def at_checkpoint(cfg: Config, which: str | None) -> Config:
    """Return the run with the checkpoint to read: `latest` (or None), `best` by validation loss, or a path."""
    if which in (None, "latest"):
        return cfg
    resume = str(best(checkpoints_of(cfg))) if which == "best" else which
    return dataclasses.replace(cfg, checkpoint=dataclasses.replace(cfg.checkpoint, resume=resume))


def best(folder: Path) -> Path:
    """Return the checkpoint of the lowest validation loss, the newest of several; raise UserError if there is none."""
    losses: dict[Path, float] = {}
    for path in checkpoint.complete(folder):
        try:
            loss = checkpoint.opened(path).index.eval_loss
        except Damaged as damage:
            print(f"{path} is damaged and passed over: {damage}", file=sys.stderr, flush=True)
            continue
        losses |= {} if loss is None else {path: loss}
    if not losses:
        fix = "evaluate at checkpoints (eval.interval), or name one"
        raise UserError("--checkpoint", f"best, but no checkpoint in {folder} has a validation loss; {fix}")
    return min(losses, key=lambda path: (losses[path], -checkpoint.number_of(path)))


def from_newest(cfg: Config, action: Callable[[Path], T]) -> T | None:
    """Return the result of `action` for a run's newest complete checkpoint, or for the one in `checkpoint.resume`."""
    result, _ = first_whole(going_on(cfg, "latest"), action)
    return result


def going_on(cfg: Config, resume: str) -> Config:
    """Return the run with `checkpoint.resume` set, by default to `resume`."""
    resume = cfg.checkpoint.resume or resume
    return dataclasses.replace(cfg, checkpoint=dataclasses.replace(cfg.checkpoint, resume=resume))


def check_names(names: Iterable[str], trained: Subject) -> None:
    """Raise UserError unless a checkpoint with parameters and buffers called `names` is one of this model.

    It may lack frozen parameters, which have initial values, and buffers.
    """
    tensors = (
        *trained.module.named_parameters(remove_duplicate=False),
        *trained.module.named_buffers(remove_duplicate=False),
    )
    stored, known = set(names), {name for name, _ in tensors}
    needed = {name for name, p in trained.module.named_parameters() if p.requires_grad}
    for problem, different in (("lacks", needed - stored), ("has", stored - known)):
        if different:
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            fix = "leave out options of the model that differ from the run's"
            raise UserError("model", f"the checkpoint {problem} {min(different)}{more}: it is of another model; {fix}")


def untrained_model(cfg: Config) -> tuple[Subject, nn.Module]:
    """Return the model, and its module with the values that training would start from, in eval mode, on the CPU."""
    untrained = model_of(cfg)
    return untrained, fill(untrained.module, ((name, value[()]) for name, value in untrained.initial())).eval()


def trained_model(cfg: Config, averaged: bool = False) -> tuple[Subject, nn.Module]:
    """Return the model, without a teacher, and its module as `with_trained_values` returns it."""
    trained = model_of(cfg)
    return trained, with_trained_values(cfg, trained, averaged)


def with_trained_values(cfg: Config, trained: Subject, averaged: bool = False) -> nn.Module:
    """Return a subject's module with the values of the newest checkpoint, in eval mode, on the CPU.

    With `averaged` these are the averages of weights. Raises UserError if there are none.
    """
    values = from_newest(cfg, checkpoint.read_averaged if averaged else checkpoint.read_model)
    assert values is not None
    check_names(values, trained)
    # frozen parameters are not in the checkpoint
    if any(name not in values for name, _ in trained.module.named_parameters()):
        values = {name: value[()] for name, value in trained.initial() if name not in values} | values
    return fill(trained.module, values.items()).eval()
