"""Initial weights that depend on the seed and on a parameter's own name, never on the mesh or the order of creation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compiler_trainer.models.llama import Llama

STD = 0.02
RESIDUAL_OUTPUTS = ("wo", "w2")


def initial_parameters(
    model: Llama, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and full initial value of each parameter, of `dtype`, and each buffer in turn.

    Values are drawn on `device`, and each kind of device draws others.
    """
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.RMSNorm):
            yield name, torch.ones(parameter.shape, dtype=dtype, device=device)
        else:
            std = initial_std(name, model.cfg.n_layers)
            yield name, init_parameter(name, parameter.shape, std, seed, device).to(dtype)
    for name, buffer in model.named_buffers():
        yield name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)


def initial_std(name: str, n_layers: int) -> float:
    """0.02, and 0.02 / sqrt(2 n_layers) for the outputs a layer adds to the residual stream (GPT-2's scheme)."""
    is_residual_output = name.removesuffix(".weight").split(".")[-1] in RESIDUAL_OUTPUTS
    return STD / math.sqrt(2 * n_layers) if is_residual_output else STD


def init_parameter(
    name: str, shape: torch.Size, std: float, seed: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return a normal fp32 tensor of the full logical `shape`, from a generator keyed by `seed` and `name` alone."""
    generator = torch.Generator(device).manual_seed(keyed(seed, name))
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)


def keyed(seed: int, name: str) -> int:
    """A seed of 64 bits that depends on another one and a name alone."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """PyTorch's own generator of the CPU keyed by `seed` and `name`; as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed(seed, name))
        yield
