"""Verify a checkpoint: read every byte and compare it with the digests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from compiler_trainer.checkpoint.index import FILE, Damaged
from compiler_trainer.checkpoint.listing import complete
from compiler_trainer.checkpoint.stored import opened_alone


def check_all(folder: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield (checkpoint, message, is undamaged) for a run folder, a folder of checkpoints, or a checkpoint.

    Raises UserError if there is none.
    """
    found = complete(folder) or complete(folder / "checkpoints") or [folder]
    for path in found:
        try:
            yield path, check(path), True
        except Damaged as damage:
            yield path, str(damage), False


def check(path: Path) -> str:
    """Verify a checkpoint and return a summary; raise Damaged, or UserError if there is none."""
    stored = opened_alone(path)
    for pieces in stored.pieces.values():
        for piece in pieces:
            piece.read()
    if strange := sorted({file.name for file in path.iterdir()} - {FILE, *stored.index.files}):
        raise Damaged(str(path / strange[0]), "is no file of this checkpoint; move it away")
    mib = sum(file.bytes for file in stored.index.files.values()) / 2**20
    files = len(stored.index.files)
    return f"{len(stored.index.tensors)} tensors in {files} file{'s' * (files > 1)}, {mib:,.1f} MiB"
