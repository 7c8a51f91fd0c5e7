"""An opened checkpoint on disk: its pieces are known by their rectangles, and each is verified when it is read."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compiler_trainer.checkpoint.earlier import names_now, with_names_now
from compiler_trainer.checkpoint.index import (
    DTYPE_BY_NAME,
    DTYPES,
    FILE,
    OLDER,
    Damaged,
    File,
    FullTensor,
    Index,
    other_format,
    read_index,
    sha256,
)
from compiler_trainer.checkpoint.listing import complete, is_name, number_of
from compiler_trainer.checkpoint.pieces import Rectangle, what_is_wrong
from compiler_trainer.config.errors import UserError


class Piece(NamedTuple):
    """A rectangle of a tensor in a file; a tuple, because ranks exchange many of them."""

    file: Path
    key: str  # its name in the file
    place: Rectangle
    dtype: torch.dtype
    sha256: str

    def read(self) -> Tensor:
        """Return its entries; raise Damaged if they were changed."""
        return self.verified(self.stored())

    def stored(self) -> Tensor:
        """Return its entries as in the file, where complex numbers are pairs; raise Damaged if they cannot be read."""
        try:
            with safe_open(self.file, "pt", backend="pread") as file:
                return file.get_tensor(self.key)
        except (SafetensorError, OSError) as error:
            raise Damaged(str(self.file), f"{self.key} cannot be read: {error}") from error

    def verified(self, stored: Tensor) -> Tensor:
        """Return entries as they were before they were stored; raise Damaged if they were changed."""
        if sha256(as_bytes(stored)) != self.sha256:
            raise Damaged(str(self.file), f"{self.key} was changed: its SHA-256 differs")
        return torch.view_as_complex(stored) if self.dtype.is_complex else stored


NamedPiece = tuple[str, Piece]  # (name of the tensor, piece)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with verified index and headers, in which the pieces of each tensor cover it.

    `holders` are the ranks that see a file, by its name; empty if all ranks see all files.
    """

    path: Path
    index: Index
    pieces: dict[str, list[Piece]]
    holders: Mapping[str, Sequence[int]]


def opened_alone(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`; this process reads only the index and the headers of all files.

    Raises UserError if there is none, Damaged if it was changed.
    """
    index = index_at(path)
    ckpt = put_together(path, index, pieces_of(path, index, index.files))
    check_complete(ckpt, ckpt.index.tensors)
    return ckpt


def index_at(path: Path) -> Index:
    """Return the index of the checkpoint at `path`; raise UserError if there is none, Damaged if its step differs."""
    if not (path / FILE).is_file():
        raise no_checkpoint(path)
    index = read_index(path)
    if is_name(path) and number_of(path) != index.step:
        raise Damaged(str(path), f"is of step {index.step}, not of the step in its name; rename it back")
    return index


def pieces_of(path: Path, index: Index, files: Iterable[str]) -> list[NamedPiece]:
    """Return the pieces in some files of a checkpoint, from their headers; raise Damaged."""
    return [piece for name in files for piece in pieces_in(path / name, index.files[name], index)]


def put_together(
    path: Path, index: Index, pieces: Iterable[NamedPiece], holders: Mapping[str, Sequence[int]] | None = None
) -> Checkpoint:
    """Return the checkpoint of some pieces by present names; they may not cover its tensors."""
    names, pieces_by_tensor = names_now(index), defaultdict[str, list[Piece]](list)
    for tensor, piece in pieces:
        if tensor in names:
            pieces_by_tensor[names[tensor]].append(piece)
    return Checkpoint(path, with_names_now(index), dict(pieces_by_tensor), holders or {})


def check_complete(ckpt: Checkpoint, tensors: Iterable[str]) -> None:
    """Raise Damaged if the pieces of one of the given tensors do not cover it."""
    for name in tensors:
        rectangles = (piece.place for piece in ckpt.pieces.get(name, ()))
        if problem := what_is_wrong(ckpt.index.tensors[name].shape, rectangles):
            raise Damaged(str(ckpt.path), f"{name} {problem}")


def check_format(folder: Path) -> None:
    """Raise OtherFormat if the newest checkpoint in a folder has a format that is not read."""
    for path in complete(folder)[-1:]:
        if (path / OLDER).exists() and not (path / FILE).is_file():
            raise no_checkpoint(path)
        with suppress(Damaged):  # another one may be undamaged
            read_index(path)


def no_checkpoint(path: Path) -> UserError:
    """Return the error for a path that is not a checkpoint."""
    if (path / OLDER).exists():
        return other_format(path, "of torch.distributed.checkpoint")
    if is_name(path) and os.path.lexists(path):
        return Damaged(str(path), f"has lost its {FILE}" if path.is_dir() else "is not a folder")
    names = ", ".join(p.name for p in complete(path))
    fix = f"; choose one of {names}" if names else ""
    return UserError(str(path), f"is not a checkpoint: it has no {FILE}{fix}")


def pieces_in(path: Path, entry: File, index: Index) -> Iterator[NamedPiece]:
    """Yield (tensor, piece) of a file, after checking its length and header against the index."""
    try:
        size = path.stat().st_size
        if size != entry.bytes:
            raise Damaged(str(path), f"has {size:,} bytes, and {entry.bytes:,} were written")
        header = read_header(path, size)
        if sha256(header) != entry.header_sha256:
            raise Damaged(str(path), "its header was changed: its SHA-256 differs")
        with safe_open(path, "pt", backend="pread") as file:
            digests = file.metadata() or {}
            for key in file.keys():
                part = file.get_slice(key)
                tensor, piece = piece_of(path, key, part.get_dtype(), tuple(part.get_shape()), digests, index)
                yield tensor, piece
    except (SafetensorError, OSError) as error:
        raise Damaged(str(path), f"cannot be read: {error}") from error


def read_header(path: Path, size: int) -> bytes:
    """Return the header of a file of `size` bytes, with the eight bytes of its length."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), size))


def piece_of(
    path: Path, key: str, code: str, shape: tuple[int, ...], digests: dict[str, str], index: Index
) -> NamedPiece:
    """Return (tensor, piece) of an entry in a file, with a `key` such as `model.wq@0,128`."""
    name, _, numbers = key.rpartition("@")
    full = index.tensors.get(name)
    offset = tuple(int(n) for n in numbers.split(",") if n.isdecimal() and len(n) < 20)
    if full is None or key not in digests or key != key_of(name, offset):
        raise Damaged(str(path), f"{key} is not a piece of a tensor of this checkpoint")
    dtype = DTYPE_BY_NAME[full.dtype]
    place = (offset, shape[:-1] if dtype.is_complex else shape)
    if code != DTYPES[dtype] or not is_inside(place, full) or dtype.is_complex and shape[-1:] != (2,):
        raise Damaged(str(path), f"{key} is {code}{list(shape)}, which is not a part of {full}")
    return name, Piece(path, key, place, dtype, digests[key])


def is_inside(place: Rectangle, full: FullTensor) -> bool:
    """Return True if a rectangle is inside a tensor."""
    offset, size = place
    if not len(offset) == len(size) == len(full.shape):
        return False
    return math.prod(size) > 0 and all(o + n <= m for o, n, m in zip(offset, size, full.shape))


def key_of(name: str, offset: tuple[int, ...]) -> str:
    """Return the name of a piece in its file."""
    return f"{name}@{','.join(map(str, offset))}"


def as_bytes(tensor: Tensor) -> np.ndarray:
    """Return the memory of a contiguous CPU tensor, uint8 [bytes]."""
    return tensor.reshape(-1).view(torch.uint8).numpy()
