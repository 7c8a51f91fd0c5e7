"""Host memory for copies of a step's state, so that it can be written while later steps change the state."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiler_trainer.checkpoint.index import DTYPES
from compiler_trainer.checkpoint.opened import key_of
from compiler_trainer.checkpoint.pieces import Placed, written_by
from compiler_trainer.config.errors import UserError
from compiler_trainer.step.ranks import waiting_for_device
from passes.ir.mesh import Mesh
from passes.ir.spec import Box

ALIGNMENT = 64  # bytes, for every piece
BLOCK = 1 << 30  # bytes; PyTorch rounds pinned memory up to powers of two, so one large block could waste half


@dataclass(frozen=True)
class Source:
    """The source of a piece: the rank's local tensor of that name."""

    name: str
    rank: int
    box: Box
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The size of its entries."""
        return math.prod(self.box.size) * self.dtype.itemsize


class Staging:
    """The pieces that the ranks of this process write, in their own memory.

    The memory is allocated once, as large as the pieces; if the state is on a GPU, it is pinned, in blocks. A tensor
    that several pipeline stages hold is written by the stage of its `first` rank.
    """

    def __init__(self, state: Placed, mesh: Mesh, first: Mapping[str, int] | None = None):
        first = first or {name: min(local) for name, (_, local) in state.items()}
        ranks = sorted({rank for _, local in state.values() for rank in local})
        self.sources = [
            Source(name, rank, box, state[name][1][rank].dtype)
            for rank in ranks
            for name, box in written_by(rank, stage_state(rank, state, mesh, first), mesh)
        ]
        for source in self.sources:
            if source.dtype not in DTYPES:
                fix = "set checkpoint.interval=null to train without"
                raise UserError("checkpoint", f"{source.name} is {source.dtype}, which cannot be stored; {fix}")
        on_gpu = any(tensor.is_cuda for _, local in state.values() for tensor in local.values())
        self.bytes = sum(pad(source.bytes) for source in self.sources)
        self.copies = [copy for block in group_blocks(self.sources) for copy in allocate_copies(block, on_gpu)]

    @property
    def pieces(self) -> dict[int, dict[str, Tensor]]:
        """The pieces to write: rank -> name in its file -> entries; complex numbers are pairs."""
        pieces: dict[int, dict[str, Tensor]] = {}
        for source, copy in zip(self.sources, self.copies):
            entries = torch.view_as_real(copy) if copy.is_complex() else copy
            pieces.setdefault(source.rank, {})[key_of(source.name, source.box.offset)] = entries
        return pieces

    def copy(self, state: Placed) -> None:
        """Copy the current values of the tensors, which may change once this returns."""
        for source, copy in zip(self.sources, self.copies):
            copy.copy_(source.box.of_local(state[source.name][1][source.rank]), non_blocking=True)
        if any(tensor.is_cuda for _, local in state.values() for tensor in local.values()):
            with waiting_for_device():
                torch.cuda.synchronize()


def group_blocks(sources: Iterable[Source]) -> Iterator[list[Source]]:
    """Yield groups of consecutive sources whose copies fill a block; a larger source is alone."""
    block, size = list[Source](), 0
    for source in sources:
        if block and size + pad(source.bytes) > BLOCK:
            yield block
            block, size = [], 0
        block.append(source)
        size += pad(source.bytes)
    yield block


def allocate_copies(block: Sequence[Source], pinned: bool) -> Iterator[Tensor]:
    """Yield memory for the copies of sources, from one allocation."""
    memory, offset = torch.zeros(sum(pad(source.bytes) for source in block), dtype=torch.uint8, pin_memory=pinned), 0
    for source in block:
        yield memory[offset : offset + source.bytes].view(source.dtype).view(source.box.size)
        offset += pad(source.bytes)


def stage_state(rank: int, state: Placed, mesh: Mesh, first: Mapping[str, int]) -> Placed:
    """Return the state that a rank's pipeline stage writes."""
    stage = rank // mesh.world_size
    return {name: placed for name, placed in state.items() if first[name] // mesh.world_size == stage}


def pad(size: int) -> int:
    """Return a number of bytes rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT
