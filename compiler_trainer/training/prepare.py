"""Preparation before compilation: seeds, agreement between ranks, and the run's starting point."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import Checkpoint, on_all_ranks
from compiler_trainer.config.earlier import is_in
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.lengths import steps_of
from compiler_trainer.config.schema import Config, TrainConfig, lasting
from compiler_trainer.config.validate import validate
from compiler_trainer.data.datasets import Datasets, datasets_of
from compiler_trainer.step.ranks import first_of_each_machine_first, rank
from compiler_trainer.training import folder
from compiler_trainer.training.compare import check_meaning
from compiler_trainer.training.progress import announce
from compiler_trainer.training.resume import first_whole
from compiler_trainer.training.store import bring, check_store


@dataclass(frozen=True)
class Start:
    """A run's starting point: its updates, the tokens read, the checkpoint, and later checkpoints that are damaged."""

    step: int = 0
    tokens: int = 0
    stored: Checkpoint | None = None
    damaged: tuple[Path, ...] = ()


def make_reproducible(cfg: TrainConfig) -> None:
    """Seed random draws at run time, and select deterministic kernels if `cfg.deterministic` is set."""
    torch.manual_seed(cfg.seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    if cfg.deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports Inductor (1 s)
        torch.use_deterministic_algorithms(cfg.deterministic)


def read_data(cfg: Config) -> Datasets:
    """Return the datasets of `cfg`; one rank of each machine tokenizes the data unless they are cached."""
    return first_of_each_machine_first(lambda: datasets_of(cfg))


def with_steps(cfg: Config, datasets: Datasets, ranks: int) -> Config:
    """Return `cfg` with its epochs or tokens as a number of steps, validated again; padding does not count as tokens.

    Steps of the checkpoint that the run resumes from count with the batch size that they had.
    """
    length, rows, batch = cfg.train.steps, datasets.train.rows, cfg.train.global_batch_size
    if isinstance(length, int):
        return cfg
    done, rows_done = behind(cfg)
    steps = steps_of(length, len(rows), batch, cfg.train.seq_len * (1 - rows.padding), done, rows_done)
    announce(f"train.steps={length} are {steps:,} steps")
    return validate(lasting(cfg, steps), ranks)


def behind(cfg: Config) -> tuple[int, int]:
    """Return the steps and samples in the checkpoint that a run resumes from, or 0 and 0 without one."""
    bring(cfg)
    stored, _ = first_whole(cfg, lambda path: on_all_ranks(lambda: checkpoint.opened(path)))
    if stored is None:
        return 0, 0
    taken = stored.index.data.get("taken")
    if is_in("data.packing", cfg.checkpoint.allow) or not isinstance(taken, list | tuple):
        return stored.index.step, stored.index.step * cfg.train.global_batch_size
    return stored.index.step, sum(taken)


def same_on_all_ranks(cfg: Config, datasets: Datasets) -> Config:
    """Return `cfg` with the run folder of rank 0, because clocks may differ.

    Raises UserError if anything else differs between ranks.
    """
    given: list[Any] = [cfg, datasets.train.rows.fingerprint]
    if dist.is_initialized():
        dist.broadcast_object_list(given, src=0)
    first, fingerprint = given
    cfg = dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, dir=first.run.dir))
    here, there = dataclasses.asdict(cfg), dataclasses.asdict(first)
    for group in here:
        if here[group] != there[group]:
            differ = f"is {here[group]} on rank {rank()}, {there[group]} on rank 0"
            raise UserError(group, f"{differ}; give all ranks the same options")
    if datasets.train.rows.fingerprint != fingerprint:
        raise UserError("data", f"rank {rank()} read other text than rank 0; give all ranks the same files")
    return cfg


def find_start(cfg: Config, datasets: Datasets, damaged: tuple[Path, ...] = ()) -> Start:
    """Return the starting point, with the data moved there; raise UserError if checkpoint or run folder do not fit.

    Checkpoints known to be `damaged` are skipped.
    """
    bring(cfg)
    stored, damaged = first_whole(cfg, lambda path: on_all_ranks(lambda: checkpoint.opened(path)), damaged)
    start = Start() if stored is None else read_start(cfg, datasets, stored)
    folder.check(cfg, stored.path if stored else None, start.step)
    check_store(cfg, start.step)
    return dataclasses.replace(start, damaged=damaged)


def move_data(datasets: Datasets, stored: Checkpoint) -> None:
    """Move the data to a checkpoint's position; raise UserError if it has none or belongs to other data."""
    try:
        datasets.train.load_state_dict(stored.index.data)
    except (KeyError, ValueError) as error:
        said = f"does not say where to go on in the data: {error!r}"
        raise UserError(str(stored.path), said) from error


def read_start(cfg: Config, datasets: Datasets, stored: Checkpoint) -> Start:
    """Return a checkpoint's starting point; raise UserError if its options or steps do not fit."""
    index, path = stored.index, stored.path
    check_meaning(cfg, index.config, str(path))
    if not is_in("data.packing", cfg.checkpoint.allow):  # with other packing, the data start from the beginning
        move_data(datasets, stored)
    if index.step >= cfg.train.steps and cfg.checkpoint.resume != "auto":
        raise UserError("train.steps", f"is {cfg.train.steps}, but {path} is at step {index.step}; ask for more")
    return Start(index.step, index.tokens, stored)
