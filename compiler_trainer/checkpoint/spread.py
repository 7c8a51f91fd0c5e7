"""Checkpoints in the memories of machines: each file is on the machine that wrote it and on the next one.

When a machine is lost, the others have all files. A rank reads those of its machine, and gets the pieces that it lacks
from ranks that have them. Pieces are verified by the rank that uses them.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from compiler_trainer.checkpoint.index import FILE, Damaged, File, sha256
from compiler_trainer.checkpoint.listing import complete
from compiler_trainer.checkpoint.load import on_all_ranks
from compiler_trainer.checkpoint.opened import (
    Checkpoint,
    check_complete,
    index_at,
    no_checkpoint,
    pieces_of,
    put_together,
)
from compiler_trainer.places.store import TRAFFIC
from compiler_trainer.step.ranks import gather, place_in_job, rank

CHUNK = 256 << 20  # bytes of a message
RUN = "run"  # a link beside snapshots, to the folder of the run's checkpoints


# ---- writing -------------------------------------------------------------------------------------------


def neighbour(rank: int, machines: Sequence[int]) -> int | None:
    """Return the rank on the next machine that gets a copy of a rank's file; None on a single machine.

    `machines` are those of all ranks.
    """
    order = [*dict.fromkeys(machines)]
    following = order[(order.index(machines[rank]) + 1) % len(order)]
    here, there = ([r for r, m in enumerate(machines) if m == machine] for machine in (machines[rank], following))
    return there[here.index(rank) % len(there)] if here != there else None


def copy_to_next(folder: Path, files: Mapping[str, File], machines: Sequence[int], group: Any) -> None:
    """Copy the ranks' files to the same folder of the next machine; every rank must call this."""
    messages = []
    for name, file in files.items():
        writer = int(Path(name).stem.removeprefix("rank_"))
        reader = neighbour(writer, machines)
        if reader is None or rank() not in (writer, reader):
            continue
        is_here = rank() == writer
        content = torch.from_file(str(folder / name), shared=not is_here, size=file.bytes, dtype=torch.uint8)
        post, other = (dist.isend, reader) if is_here else (dist.irecv, writer)
        messages += [(part.nbytes, post(part, other, group)) for part in content.split(CHUNK)]
    for size, message in messages:
        assert message is not None
        message.wait()
        TRAFFIC.relative_update(size)


# ---- reading -------------------------------------------------------------------------------------------


def opened(path: Path) -> Checkpoint:
    """Return a checkpoint whose files are on several machines; every rank calls this, with its own `path`.

    Ranks that do not have it, because their machine has come later, may call it, too. Raises UserError if no rank has
    the checkpoint, and Damaged on all ranks if a file is missing or was changed.
    """
    digests = gather(sha256((path / FILE).read_bytes()) if (path / FILE).is_file() else None)
    first = next((r for r, digest in enumerate(digests) if digest), None)
    if first is None:
        raise no_checkpoint(path)
    is_same = digests[rank()] == digests[first]  # another one is of an earlier round that took these steps, too
    index = gather(on_all_ranks(lambda: index_at(path) if rank() == first else None))[first]
    assert index is not None
    here = [name for name in index.files if is_same and (path / name).is_file()]
    holders = defaultdict[str, list[int]](list)
    for number, names in enumerate(gather(here)):
        for name in names:
            holders[name].append(number)
    if lacking := sorted(index.files.keys() - holders.keys()):
        raise Damaged(str(path), f"lacks {lacking[0]}, which was on machines that are lost")
    pieces = on_all_ranks(lambda: pieces_of(path, index, [name for name in here if holders[name][0] == rank()]))
    named_pieces = [named_piece for part in gather(pieces) for named_piece in part]
    pieces_here = ((tensor, piece._replace(file=path / piece.file.name)) for tensor, piece in named_pieces)
    ckpt = put_together(path, index, pieces_here, holders)
    number, ranks = place_in_job()
    on_all_ranks(lambda: check_complete(ckpt, list(ckpt.index.tensors)[number::ranks]))
    return ckpt


# ---- after the job -------------------------------------------------------------------------------------


def link_to_run(folder: Path, checkpoints: Path) -> None:
    """Note beside snapshots where the run's checkpoints are."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / RUN).is_symlink():
        (folder / RUN).symlink_to(checkpoints.resolve())


def bring_to_run(folder: Path) -> None:
    """Copy this machine's files of the newest snapshot to the run's checkpoints, if it has any.

    Each machine does so in its own time; the one that brings the last file gives the checkpoint its name. It gets none
    if machines that are lost had some of the files.
    """
    for path in complete(folder)[-1:] if (folder / RUN).is_symlink() else ():
        index = index_at(path)
        target = (folder / RUN).resolve() / path.name
        partial = target.with_suffix(".tmp")
        if target.exists():
            return
        partial.mkdir(parents=True, exist_ok=True)
        for name in (*index.files, FILE):
            if (path / name).is_file() and not (partial / name).exists():
                copy = partial.with_name(f"{partial.stem}.{socket.gethostname()}-{os.getpid()}.tmp")
                shutil.copyfile(path / name, copy)
                os.replace(copy, partial / name)
        if all((partial / name).is_file() for name in index.files):
            with suppress(OSError):  # another machine was faster
                os.rename(partial, target)
