"""What is bisected: the first step of a run with some options, or the step after a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from compiler_trainer.checkpoint import opened
from compiler_trainer.config.compose import compose, typed
from compiler_trainer.config.device import for_running
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import validate
from compiler_trainer.data.datasets import Datasets, check_vocabulary, datasets_of
from compiler_trainer.models.skeleton import fill
from compiler_trainer.models.subject import Subject, subject
from compiler_trainer.runs.saved import from_newest, options_of, trained_model
from compiler_trainer.training.prepare import move_data
from compiler_trainer.training.trainer import peek


class Case(NamedTuple):
    """Options, what they train, the module with its values, and a batch."""

    cfg: Config
    trained: Subject
    model: nn.Module
    batch: dict[str, Tensor]


def at_start(overrides: Sequence[str]) -> Case:
    """The first step of a run with some options, its weights in fp64."""
    cfg = on_its_ranks(for_running(typed(compose(overrides))))
    trained, datasets = subject(cfg), read(cfg)
    check_vocabulary(datasets, trained.vocab_size)
    return Case(cfg, trained, in_fp64(trained), peek(datasets.train))


def at_checkpoint(run: Path, overrides: Sequence[str]) -> Case:
    """The step after a checkpoint, the newest or the one that `checkpoint.resume` names, as it was computed."""
    cfg = on_its_ranks(for_running(options_of(run, overrides)))
    datasets, stored = read(cfg), from_newest(cfg, opened)
    assert stored is not None
    move_data(datasets, stored)
    trained, model = trained_model(cfg)
    return Case(cfg, trained, model.train(), peek(datasets.train))


def on_its_ranks(cfg: Config) -> Config:
    """The config on as many ranks as its mesh asks for; raises UserError."""
    return validate(cfg, math.prod(max(size, 1) for size in dataclasses.asdict(cfg.mesh).values()))


def read(cfg: Config) -> Datasets:
    """The data of a run."""
    return datasets_of(cfg, reference=0.0)


def in_fp64(trained: Subject) -> nn.Module:
    """The model with its initial weights, in fp64."""
    return fill(trained.module, ((name, value[()]) for name, value in trained.initial())).double()
