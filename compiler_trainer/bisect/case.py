"""The step to bisect: the first step of a run with some options, or the step after a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from compiler_trainer.checkpoint import opened
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import for_running, resolve_auto
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import stated, validate
from compiler_trainer.data.datasets import Datasets, check_vocabulary, datasets_of
from compiler_trainer.models.skeleton import fill
from compiler_trainer.models.subject import Subject, subject
from compiler_trainer.runs.saved import from_newest, options_of, with_trained_values
from compiler_trainer.training.prepare import move_data
from compiler_trainer.training.trainer import peek


class Case(NamedTuple):
    """A step to bisect: options, their subject, the module with its values, and a batch."""

    cfg: Config
    trained: Subject
    model: nn.Module
    batch: dict[str, Tensor]


def at_start(overrides: Sequence[str]) -> Case:
    """Return the first step of a run with some options, its weights in fp64."""
    cfg = on_its_ranks(resolve_auto(to_config(compose(overrides)), on_gpu=False))  # all ranks run on the CPU
    trained, datasets = subject(cfg), read(cfg)
    check_vocabulary(datasets, trained.vocab_size)
    return Case(cfg, trained, in_fp64(trained), peek(datasets.train))


def at_checkpoint(run: Path, overrides: Sequence[str]) -> Case:
    """Return the step after a checkpoint, the newest or `checkpoint.resume`, in the run's own dtypes."""
    cfg = on_its_ranks(for_running(options_of(run, overrides)))
    datasets, stored = read(cfg), from_newest(cfg, opened)
    assert stored is not None
    move_data(datasets, stored)
    trained = subject(cfg)
    return Case(cfg, trained, with_trained_values(cfg, trained).train(), peek(datasets.train))


def on_its_ranks(cfg: Config) -> Config:
    """Return the validated config for the ranks of its mesh; raise UserError."""
    is_open = -1 in vars(cfg.mesh).values()
    return validate(cfg, stated(cfg.mesh) * (cfg.mesh.ep if is_open else 1))


def read(cfg: Config) -> Datasets:
    """Return the data of a run."""
    return datasets_of(cfg, reference=0.0)


def in_fp64(trained: Subject) -> nn.Module:
    """Return the model with its initial weights, in fp64."""
    return fill(trained.module, ((name, value[()]) for name, value in trained.initial())).double()
