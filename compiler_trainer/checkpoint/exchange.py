"""Pieces of a checkpoint whose files are on several machines: ranks get those that they lack from others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from compiler_trainer.checkpoint.index import Damaged
from compiler_trainer.checkpoint.opened import Checkpoint, Piece, as_bytes
from compiler_trainer.checkpoint.pieces import Rectangle
from compiler_trainer.step.ranks import gather, host_group, rank


class Received(NamedTuple):
    """A piece that another rank has read from its file."""

    piece: Piece
    stored: Tensor

    @property
    def place(self) -> Rectangle:
        """The offset in the full tensor, and the size."""
        return self.piece.place

    def read(self) -> Tensor:
        """Return its entries; raise Damaged if they were changed."""
        return self.piece.verified(self.stored)


def exchanged(ckpt: Checkpoint, needed: Mapping[str, Set[int]]) -> Iterator[tuple[str, Sequence[Piece | Received]]]:
    """Yield each tensor with its pieces; every rank calls this and takes all.

    `needed` are the numbers of the pieces that this rank reads, by tensor.
    """
    group, holders = host_group(), ckpt.holders
    lacking = {
        name: [n for n in sorted(numbers) if rank() not in holders[ckpt.pieces[name][n].file.name]]
        for name, numbers in needed.items()
    }
    lacking_by_rank = gather(lacking, group)
    for name, pieces in ckpt.pieces.items():
        messages, received = [], dict[int, Received]()
        for reader, lacks in enumerate(lacking_by_rank):
            for number in lacks.get(name, ()):
                piece = pieces[number]
                ranks = holders[piece.file.name]
                sender = ranks[number % len(ranks)]
                if rank() == sender:
                    messages.append(dist.isend(bytes_of(stored_or_zeros(piece)), reader, group))
                elif rank() == reader:
                    received[number] = Received(piece, empty(piece))
                    messages.append(dist.irecv(bytes_of(received[number].stored), sender, group))
        for message in messages:
            assert message is not None
            message.wait()
        yield name, [received.get(number, piece) for number, piece in enumerate(pieces)]


def empty(piece: Piece) -> Tensor:
    """Return memory for the entries of a piece, as they are in its file."""
    entries = torch.zeros(piece.place[1], dtype=piece.dtype)
    return torch.view_as_real(entries) if piece.dtype.is_complex else entries


def stored_or_zeros(piece: Piece) -> Tensor:
    """Return the entries of a piece as they are in its file; if it cannot be read, zeros, which the reader refuses."""
    try:
        return piece.stored()
    except Damaged:
        return empty(piece)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous CPU tensor, uint8 [bytes]."""
    return torch.from_numpy(as_bytes(tensor))
