"""Host memory that a step's state is copied to, so that it can be written while the next steps change it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiler_trainer.checkpoint.index import DTYPES
from compiler_trainer.checkpoint.pieces import Placed, written_by
from compiler_trainer.checkpoint.stored import key_of
from compiler_trainer.config.errors import UserError
from passes.program.mesh import Mesh
from passes.program.spec import Box

ALIGNMENT = 64  # bytes, of every piece
BLOCK = 1 << 30  # bytes; PyTorch pins powers of two: of one block for all, half might be for nothing


@dataclass(frozen=True)
class Source:
    """Where a piece is copied from: the rank's local tensor of that name."""

    name: str
    rank: int
    box: Box
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """What its entries take."""
        return math.prod(self.box.size) * self.dtype.itemsize


class Staging:
    """The pieces that the ranks of this process write, in memory of their own.

    It is taken once, as much as those pieces have bytes; pinned, in blocks, where state is on a GPU. What ranks of
    several pipeline stages hold is written by those of the one stage that has the `first` rank.
    """

    def __init__(self, state: Placed, mesh: Mesh, first: Mapping[str, int] | None = None):
        first = first or {name: min(local) for name, (_, local) in state.items()}
        ranks = sorted({rank for _, local in state.values() for rank in local})
        self.sources = [
            Source(name, rank, box, state[name][1][rank].dtype)
            for rank in ranks
            for name, box in written_by(rank, of_stage(rank, state, mesh, first), mesh)
        ]
        for source in self.sources:
            if source.dtype not in DTYPES:
                fix = "set checkpoint.interval=null to train without"
                raise UserError("checkpoint", f"{source.name} is {source.dtype}, which cannot be stored; {fix}")
        on_gpu = any(tensor.is_cuda for _, local in state.values() for tensor in local.values())
        self.bytes = sum(padded(source.bytes) for source in self.sources)
        self.copies = [copy for block in in_blocks(self.sources) for copy in copies_of(block, on_gpu)]

    @property
    def pieces(self) -> dict[int, dict[str, Tensor]]:
        """What to write: rank -> name in its file -> entries, complex ones as pairs."""
        found: dict[int, dict[str, Tensor]] = {}
        for source, copy in zip(self.sources, self.copies):
            entries = torch.view_as_real(copy) if copy.is_complex() else copy
            found.setdefault(source.rank, {})[key_of(source.name, source.box.offset)] = entries
        return found

    def copy(self, state: Placed) -> None:
        """Take what the tensors hold now; they may change as soon as this returns."""
        for source, copy in zip(self.sources, self.copies):
            copy.copy_(source.box.of_local(state[source.name][1][source.rank]), non_blocking=True)
        if any(tensor.is_cuda for _, local in state.values() for tensor in local.values()):
            torch.cuda.synchronize()


def in_blocks(sources: Iterable[Source]) -> Iterator[list[Source]]:
    """Sources in a row whose copies fill a block; one that is larger than that alone."""
    block, size = list[Source](), 0
    for source in sources:
        if block and size + padded(source.bytes) > BLOCK:
            yield block
            block, size = [], 0
        block.append(source)
        size += padded(source.bytes)
    yield block


def copies_of(block: Sequence[Source], pinned: bool) -> Iterator[Tensor]:
    """Room for copies of sources, in memory taken at once."""
    memory, at = torch.zeros(sum(padded(each.bytes) for each in block), dtype=torch.uint8, pin_memory=pinned), 0
    for source in block:
        yield memory[at : at + source.bytes].view(source.dtype).view(source.box.size)
        at += padded(source.bytes)


def of_stage(rank: int, state: Placed, mesh: Mesh, first: Mapping[str, int]) -> Placed:
    """What a rank's pipeline stage writes."""
    stage = rank // mesh.world_size
    return {name: placed for name, placed in state.items() if first[name] // mesh.world_size == stage}


def padded(size: int) -> int:
    """A number of bytes, up to the next multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
