"""Refuse models and batches that cannot fit into this machine's memory, before anything is allocated."""

from __future__ import annotations

import os

import torch

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.models.subject import Subject
from compiler_trainer.step.given import mesh_of

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
