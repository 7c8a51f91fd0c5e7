"""Verify a checkpoint: read every byte and compare it with the digests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from compiler_trainer.checkpoint.index import FILE, Damaged
from compiler_trainer.checkpoint.listing import complete
from compiler_trainer.checkpoint.opened import opened_alone


def check_all(folder: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield (checkpoint, message, is undamaged) for a run folder, a folder of checkpoints, or a checkpoint.

    Raises UserError if there is none.
    """
    checkpoints = complete(folder) or complete(folder / "checkpoints") or [folder]
    for path in checkpoints:
        try:
            yield path, check(path), True
        except Damaged as damage:
            yield path, str(damage), False


def check(path: Path) -> str:
    """Verify a checkpoint and return a summary; raise Damaged, or UserError if there is none."""
    ckpt = opened_alone(path)
    for pieces in ckpt.pieces.values():
        for piece in pieces:
            piece.read()
    if unexpected := sorted({file.name for file in path.iterdir()} - {FILE, *ckpt.index.files}):
        raise Damaged(str(path / unexpected[0]), "is not a file of this checkpoint; move it away")
    mib = sum(file.bytes for file in ckpt.index.files.values()) / 2**20
    files = len(ckpt.index.files)
    return f"{len(ckpt.index.tensors)} tensors in {files} file{'s' * (files > 1)}, {mib:,.1f} MiB"
