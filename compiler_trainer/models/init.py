"""Initial weights that depend on the seed and on a parameter's own name, never on the mesh or the order of creation.

Each entry is a function of the seed, the name and the entry's index in the full tensor, so a rank draws only the
entries that it stores. PCG64DXSM can jump to any of its 64-bit numbers; number k makes entries 2k and 2k + 1.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from compiler_trainer.models.llama import Llama
from passes.ir.spec import Value

STD = 0.02
RESIDUAL_OUTPUTS = ("wo", "w2")
CHUNK = 1 << 16  # entries drawn at a time: their arrays fit into the cache of a core
Run = tuple[int, int]  # the first index in the flattened tensor, and the number of entries


def initial_parameters(model: Llama, seed: int, dtype: torch.dtype) -> Iterator[tuple[str, Value]]:
    """Yield the name and initial value of each parameter, of `dtype`, and then of each buffer."""
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.RMSNorm):
            yield name, torch.ones(parameter.shape, dtype=dtype)
        else:
            std = initial_std(name, model.cfg.n_layers)
            yield name, Normal(tuple(parameter.shape), dtype, std, keyed(seed, name))
    for name, buffer in model.named_buffers():
        yield name, torch.zeros(buffer.shape, dtype=buffer.dtype)


def initial_std(name: str, n_layers: int) -> float:
    """Return 0.02, or 0.02 / sqrt(2 n_layers) for a layer's outputs to the residual stream (GPT-2's scheme)."""
    is_residual_output = name.removesuffix(".weight").split(".")[-1] in RESIDUAL_OUTPUTS
    return STD / math.sqrt(2 * n_layers) if is_residual_output else STD


@dataclass(frozen=True)
class Normal:
    """The normal random numbers of a tensor, drawn in float32 and cast to `dtype`; each slice can be drawn alone.

    An entry depends on `seed` and on its index in the full tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    std: float
    seed: int

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """Draw the entries of a rectangle, on the CPU cores of this rank."""
        full_slices = [slice(None)] * (len(self.shape) - len(index))
        places = [range(size)[cut] for size, cut in zip(self.shape, [*index, *full_slices])]
        drawn = torch.empty([len(place) for place in places], dtype=self.dtype)
        if not drawn.numel():
            return drawn
        batches = list(in_batches(runs(self.shape, places)))
        parts = drawn.view(-1).split([sum(count for _, count in batch) for batch in batches])
        fill = partial(fill_normal, self.seed, self.std)
        if len(batches) == 1:
            fill(batches[0], parts[0])
        else:
            with ThreadPoolExecutor(cores()) as pool:
                list(pool.map(fill, batches, parts))
        return drawn


def fill_normal(seed: int, std: float, batch: Sequence[Run], into: Tensor) -> None:
    """Write the normal numbers of some runs into a flat tensor, one run after the other."""
    spans = [(first // 2, (first + count + 1) // 2) for first, count in batch]
    entries, at = torch.from_numpy(box_muller(bits(seed, spans), std)), 0
    for (first, count), (begin, end), part in zip(batch, spans, into.split([count for _, count in batch])):
        part.copy_(entries[at + first % 2 : at + first % 2 + count])
        at += 2 * (end - begin)


def bits(seed: int, spans: Sequence[tuple[int, int]]) -> NDArray[np.uint64]:
    """Return the 64-bit numbers of a seed's generator at the spans, from `first` to `end` of each, uint64 [N]."""
    source, at = np.random.PCG64DXSM(seed), 0
    generator = np.random.Generator(source)
    numbers = []
    for first, end in spans:
        source.advance(first - at)
        numbers.append(generator.integers(0, 2**64, end - first, dtype=np.uint64))
        at = end
    return numbers[0] if len(numbers) == 1 else np.concatenate(numbers)


def box_muller(numbers: NDArray[np.uint64], std: float) -> NDArray[np.float32]:
    """Return two independent normal numbers for each 64-bit number, from the upper 24 bits of its halves, fp32 [2 N].

    Box and Muller, A note on the generation of random normal deviates, 1958.
    """
    halves = numbers.astype("<u8", copy=False).view("<u4") >> np.uint32(8)
    radius, angle = (halves[half::2].astype(np.float32) for half in (0, 1))
    radius += 1
    radius *= np.float32(2**-24)  # above 0
    np.log(radius, out=radius)
    radius *= np.float32(-2)
    np.sqrt(radius, out=radius)
    radius *= np.float32(std)
    angle *= np.float32(2 * math.pi * 2**-24)
    pairs = np.empty((len(numbers), 2), np.float32)
    np.multiply(radius, np.cos(angle), out=pairs[:, 0])
    np.multiply(radius, np.sin(angle, out=angle), out=pairs[:, 1])
    return pairs.reshape(-1)


def runs(shape: Sequence[int], places: Sequence[range]) -> Iterator[Run]:
    """Yield the contiguous runs of a rectangle, in order, each of at most `CHUNK` entries.

    `places` are the rectangle's indices in each dim.
    """
    incomplete = len(shape)
    while incomplete and len(places[incomplete - 1]) == shape[incomplete - 1]:
        incomplete -= 1
    split = max(incomplete - 1, 0)  # the dims after it are complete
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    count = math.prod(map(len, places[split:]))
    begin = places[split].start * strides[split] if shape else 0
    for outer in itertools.product(*places[:split]):
        first = begin + sum(i * stride for i, stride in zip(outer, strides))
        yield from ((first + at, min(CHUNK, count - at)) for at in range(0, count, CHUNK))


def in_batches(of_slice: Iterable[Run]) -> Iterator[list[Run]]:
    """Group runs in order, up to `CHUNK` entries together."""
    batch, size = list[Run](), 0
    for run in of_slice:
        if batch and size + run[1] > CHUNK:
            yield batch
            batch, size = [], 0
        batch.append(run)
        size += run[1]
    yield batch


def cores() -> int:
    """Return the CPU cores of this rank: those of the process, divided among the ranks of its machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def keyed(seed: int, name: str) -> int:
    """Return a 64-bit seed that depends only on `seed` and `name`."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little")


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Key PyTorch's CPU generator by `seed` and `name` in the context; restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed(seed, name))
        yield
