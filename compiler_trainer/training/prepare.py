"""Preparation before compilation: seeds, agreement between ranks, the starting point, memory, times of phases.

The captured graph is compared with the model, unless the tests cover this kind of model: a small model by value on two
samples of the first batch, a large one by the parameters that get gradients.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compiler_trainer import BEGAN
from compiler_trainer.capture.compare import captured_difference
from compiler_trainer.checkpoint import Checkpoint, on_all_ranks
from compiler_trainer.config.earlier import is_in
from compiler_trainer.config.errors import UserError, one_line
from compiler_trainer.config.options import steps_of
from compiler_trainer.config.schema import (
    Config,
    DistillationConfig,
    FolderConfig,
    ModelConfig,
    TrainConfig,
    with_steps,
)
from compiler_trainer.config.validate import validate
from compiler_trainer.data.datasets import Datasets, datasets_of
from compiler_trainer.data.stream import StreamLoader
from compiler_trainer.models.folder import text_config_of
from compiler_trainer.models.place import folder_of, teacher_of
from compiler_trainer.models.skeleton import fill
from compiler_trainer.models.subject import Subject
from compiler_trainer.step.captured import mesh_of
from compiler_trainer.step.ranks import first_of_each_machine_first, from_rank_0, rank
from compiler_trainer.training import folder
from compiler_trainer.training.checkpoints import bring, check_meaning, check_storable, check_store, first_whole, opened
from compiler_trainer.training.loggers import announce


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
    length, rows, batch = cfg.train.steps, datasets.train.rows, datasets.train.batch_size
    if isinstance(length, int):
        return cfg
    if cfg.has_rollouts and length.endswith("tokens"):
        raise UserError("train.steps", f"{length} counts tokens of answers, not drawn yet; give steps or epochs")
    done, rows_done = resumed_steps(cfg)
    steps = steps_of(length, len(rows), batch, cfg.train.seq_len * (1 - rows.padding), done, rows_done)
    announce(f"train.steps={length} are {steps:,} steps")
    return validate(with_steps(cfg, steps), ranks)


def resumed_steps(cfg: Config) -> tuple[int, int]:
    """Return the steps and samples in the checkpoint that a run resumes from, or 0 and 0 without one."""
    bring(cfg)
    ckpt, _ = first_whole(cfg, lambda path: on_all_ranks(lambda: opened(cfg, path)))
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
    first, fingerprint = from_rank_0(lambda: (cfg, datasets.train.rows.fingerprint))
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
    check_storable(cfg)
    bring(cfg)
    ckpt, damaged_paths = first_whole(cfg, lambda path: on_all_ranks(lambda: opened(cfg, path)), damaged_paths)
    start = Start() if ckpt is None else read_start(cfg, datasets, ckpt)
    folder.check(cfg, ckpt.path if ckpt else None, start.step)
    check_store(cfg, start.step)
    return dataclasses.replace(start, damaged_paths=damaged_paths)


def open_streams(datasets: Datasets) -> None:
    """Read the next window of streams on one rank of each machine, while the others wait; raise UserError."""
    if isinstance(datasets.train, StreamLoader):
        first_of_each_machine_first(datasets.train.open)


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


# ---- the captured graph against the model --------------------------------------------------------------

TESTED = frozenset(
    "deepseek_v3 gemma gemma3_text gpt2 llama llama4_text mixtral qwen3 qwen3_moe".split()
)  # model types of transformers that tests compare by value
MOST_WORK = 1e10  # parameters times tokens; eager PyTorch takes a few seconds for it
ROWS = 2


def is_tested(cfg: Config) -> bool:
    """Return True if tests compare models and losses of this kind with eager PyTorch."""
    if cfg.has_own_loss or cfg.sees:
        return False
    if isinstance(cfg.model, FolderConfig):
        folders = [folder_of(cfg), *([teacher_of(cfg)] if isinstance(cfg.loss, DistillationConfig) else [])]
        return {text_config_of(folder, sees=False).model_type for folder in folders} <= TESTED
    return isinstance(cfg.model, ModelConfig)


def check_capture(cfg: Config, trained: Subject, batch: Callable[[], Mapping[str, Tensor]]) -> str:
    """Return a note if model and graph cannot be compared, otherwise an empty string.

    Raises UserError on all ranks if they differ.
    """
    if is_tested(cfg) or cfg.passes.verify == "none":
        return ""
    difference, note = from_rank_0(lambda: find_difference(trained, batch()))
    if difference:
        fix = "report this model to us, or set passes.verify=none to train with the graph as it is"
        raise UserError("model", f"{difference}: the captured graph differs from eager PyTorch; {fix}")
    return note


def find_difference(trained: Subject, batch: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return (the first difference between model and graph, a note if they cannot be compared), empty if there is none.

    A model that cannot be captured is refused later, with the reason.
    """
    rows = {name: value[:ROWS].cpu() for name, value in batch.items()}
    work = sum(p.numel() for p in trained.module.parameters()) * max(value.numel() for value in rows.values())
    model = copy.deepcopy(trained.module).train()
    try:
        if work <= MOST_WORK:
            fill(model, ((name, torch.as_tensor(value[()])) for name, value in trained.initial()))
        return captured_difference(model, trained.loss, rows, values=work <= MOST_WORK), ""
    except UserError:
        return "", ""
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)[:120]}"
        return "", f"note: the captured graph is not compared with the model, which does not run on the CPU ({reason})"


# ---- memory --------------------------------------------------------------------------------------------

BATCH_ENTRIES, BATCH_BYTES = 4, 8  # per token: tokens, labels, positions, documents, as int64


def check_room(cfg: Config, trained: Subject) -> None:
    """Raise UserError if the parameters alone, or a batch alone, are larger than memory."""
    ranks = mesh_of(cfg.mesh).world_size
    size = sum(p.numel() * p.element_size() for p in trained.module.parameters()) / (ranks / cfg.mesh.dp_replicate)
    local_ranks = 1 if torch.cuda.is_available() else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if size * local_ranks > device_bytes():
        place = f"on each of {ranks} ranks, which have {gib(device_bytes() / local_ranks)} each"
        fix = "make it smaller, or shard it over more ranks"
        raise UserError("model", f"its parameters take {gib(size)} {place}; {fix}")
    batch = cfg.train.global_batch_size * cfg.train.seq_len * BATCH_ENTRIES * BATCH_BYTES
    if batch > host_bytes():
        problem = f"with train.seq_len={cfg.train.seq_len} makes a batch of {gib(batch)}, more than this machine has"
        raise UserError("train.global_batch_size", f"{cfg.train.global_batch_size} {problem}; make either smaller")


def host_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_bytes() -> int:
    """Return the memory of a rank's device."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else host_bytes()


def gib(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"


# ---- times of phases -----------------------------------------------------------------------------------

runs = itertools.count()  # runs of this process, such as the points of a sweep


@dataclass
class Phases:
    """Seconds of each phase before the first step, in order; a process's first run counts from the package's import."""

    seconds: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=lambda: time.perf_counter() if next(runs) else BEGAN)

    def end(self, name: str) -> float:
        """End a phase that lasted since the previous one ended, and return its seconds."""
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now
        return self.seconds[name]

    def end_compiling(self, seconds: Mapping[str, float]) -> None:
        """Split the compile time into its stages' seconds; the remainder goes to weights."""
        kernels = sum(s for name, s in seconds.items() if name.endswith(".lower"))
        capture = seconds.get("capture", 0.0)
        programs = sum(seconds.values()) - kernels - capture
        weights = max(0.0, self.end("weights") - sum(seconds.values()))
        self.seconds |= {"capture": capture, "program": programs, "kernels": kernels, "weights": weights}

    def report(self) -> dict[str, Any]:
        """Return seconds by phase, and the CPU seconds of all cores, with those of compiler processes."""
        seconds = {name: round(s, 4) for name, s in self.seconds.items()}
        return {"start": seconds, "start_cpu_s": round(sum(os.times()[:4]), 2)}

    def __str__(self) -> str:
        """Return a line such as `6.1 s: import 2.9, program 0.4, kernels 0.8`, without phases that took no time."""
        parts = (f"{name} {s:.1f}" for name, s in self.seconds.items() if s >= 0.05)
        return f"{sum(self.seconds.values()):.1f} s: {', '.join(parts)}"
