"""The ranks of a torchrun job: joining and leaving its process group."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def start_ranks() -> int:
    """Join the job that torchrun started (gloo on CPU, nccl on CUDA); the number of ranks, 1 without torchrun."""
    if "RANK" not in os.environ:
        return 1
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_world_size()


def stop_ranks() -> None:
    """Leave the process group; does not wait for ranks that failed."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """This process's rank, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0
