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
    ckpt: Checkpoint | None = None
    damaged_paths: tuple[Path, ...] = ()


def make_reproducible(cfg: TrainConfig) -> None:
    """Seed random draws at run time, and select deterministic kernels if `cfg.deterministic` is set."""
    torch.manual_seed(cfg.seed)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    if cfg.deterministic != torch.are_deterministic_algorithms_enabled():  # setting it imports Inductor (1 s)
        torch.use_deterministic_algorithms(cfg.deterministic)


def read_data(cfg: Config) -> Datasets:
    """Return the datasets of `cfg`; one rank of each machine tokenizes the data unless they are cached."""
    return first_of_each_machine_first(lambda: datasets_of(cfg))


def resolve_steps(cfg: Config, datasets: Datasets, ranks: int) -> Config:
    """Return `cfg` with its epochs or tokens as a number of steps, validated again; padding does not count as tokens.

    Steps of the checkpoint that the run resumes from count with the batch size that they had.
    """
    length, rows, batch = cfg.train.steps, datasets.train.rows, cfg.train.global_batch_size
    if isinstance(length, int):
        return cfg
    done, rows_done = resumed_steps(cfg)
    steps = steps_of(length, len(rows), batch, cfg.train.seq_len * (1 - rows.padding), done, rows_done)
    announce(f"train.steps={length} are {steps:,} steps")
    return validate(lasting(cfg, steps), ranks)


def resumed_steps(cfg: Config) -> tuple[int, int]:
    """Return the steps and samples in the checkpoint that a run resumes from, or 0 and 0 without one."""
    bring(cfg)
    ckpt, _ = first_whole(cfg, lambda path: on_all_ranks(lambda: checkpoint.opened(path)))
    if ckpt is None:
        return 0, 0
    rows_per_step = ckpt.index.data.get("taken")
    if is_in("data.packing", cfg.checkpoint.allow) or not isinstance(rows_per_step, list | tuple):
        return ckpt.index.step, ckpt.index.step * cfg.train.global_batch_size
    return ckpt.index.step, sum(rows_per_step)


def same_on_all_ranks(cfg: Config, datasets: Datasets) -> Config:
    """Return `cfg` with the run folder of rank 0, because clocks may differ.

    Raises UserError if anything else differs between ranks.
    """
    shared: list[Any] = [cfg, datasets.train.rows.fingerprint]
    if dist.is_initialized():
        dist.broadcast_object_list(shared, src=0)
    first, fingerprint = shared
    cfg = dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, dir=first.run.dir))
    options, first_options = dataclasses.asdict(cfg), dataclasses.asdict(first)
    for group in options:
        if options[group] != first_options[group]:
            problem = f"is {options[group]} on rank {rank()}, {first_options[group]} on rank 0"
            raise UserError(group, f"{problem}; give all ranks the same options")
    if datasets.train.rows.fingerprint != fingerprint:
        raise UserError("data", f"rank {rank()} read different data than rank 0; give all ranks the same files")
    return cfg


def find_start(cfg: Config, datasets: Datasets, damaged_paths: tuple[Path, ...] = ()) -> Start:
    """Return the starting point, with the data moved there; raise UserError if checkpoint or run folder do not fit.

    Checkpoints known to be damaged (`damaged_paths`) are skipped.
    """
    bring(cfg)
    ckpt, damaged_paths = first_whole(cfg, lambda path: on_all_ranks(lambda: checkpoint.opened(path)), damaged_paths)
    start = Start() if ckpt is None else read_start(cfg, datasets, ckpt)
    folder.check(cfg, ckpt.path if ckpt else None, start.step)
    check_store(cfg, start.step)
    return dataclasses.replace(start, damaged_paths=damaged_paths)


def move_data(datasets: Datasets, ckpt: Checkpoint) -> None:
    """Move the data to a checkpoint's position; raise UserError if it has none or belongs to other data."""
    try:
        datasets.train.load_state_dict(ckpt.index.data)
    except (KeyError, ValueError) as error:
        problem = f"does not contain the data's position: {error!r}"
        raise UserError(str(ckpt.path), problem) from error


def read_start(cfg: Config, datasets: Datasets, ckpt: Checkpoint) -> Start:
    """Return a checkpoint's starting point; raise UserError if its options or steps do not fit."""
    index, path = ckpt.index, ckpt.path
    check_meaning(cfg, index.config, str(path))
    if not is_in("data.packing", cfg.checkpoint.allow):  # with other packing, the data start from the beginning
        move_data(datasets, ckpt)
    if index.step >= cfg.train.steps and cfg.checkpoint.resume != "auto":
        raise UserError("train.steps", f"is {cfg.train.steps}, but {path} is at step {index.step}; increase it")
    return Start(index.step, index.tokens, ckpt)
