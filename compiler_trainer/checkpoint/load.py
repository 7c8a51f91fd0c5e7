"""Read a checkpoint into the state of a step on any mesh, or into full tensors; everything is verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from compiler_trainer.checkpoint.exchange import Received, exchanged
from compiler_trainer.checkpoint.index import DTYPE_BY_NAME, Damaged, FullTensor
from compiler_trainer.checkpoint.opened import (
    Checkpoint,
    Piece,
    check_complete,
    index_at,
    opened_alone,
    pieces_of,
    put_together,
)
from compiler_trainer.checkpoint.pieces import Placed, Rectangle, Stateful, overlap, state_of
from compiler_trainer.config.errors import UserError
from compiler_trainer.step.ranks import gather, place_in_job
from passes.ir.spec import Spec, boxes

MODEL, AVERAGE = "model.", "ema."  # prefixes of parameters and buffers, and of averages of parameters
SHOWN = 3  # differences named in an error

T = TypeVar("T")
Target = tuple[Rectangle, Tensor]  # the place in the full tensor, and a view to write into


def opened(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`, of which only the index and headers are read; every rank must call this.

    Each header is read by one rank of the job, and each tensor's pieces are checked by one rank. Raises UserError if
    there is no checkpoint, and Damaged on all ranks if it was changed.
    """
    number, ranks = place_in_job()
    index = on_all_ranks(lambda: index_at(path))
    pieces = on_all_ranks(lambda: pieces_of(path, index, list(index.files)[number::ranks]))
    ckpt = put_together(path, index, (piece for part in gather(pieces) for piece in part))
    on_all_ranks(lambda: check_complete(ckpt, list(ckpt.index.tensors)[number::ranks]))
    return ckpt


def load(step: Stateful, ckpt: Checkpoint, may_lack: Set[str] = frozenset()) -> None:
    """Load a checkpoint into the state of `step`; every rank must call this.

    State in `may_lack` that the checkpoint lacks stays as it is. Raises UserError, with nothing changed, if the
    checkpoint has other tensors. Raises Damaged on all ranks if a piece that one of them reads was changed; some state
    is overwritten by then.
    """
    theirs = ckpt.index.tensors
    state = {name: placed for name, placed in state_of(step).items() if name in theirs or name not in may_lack}
    ours = {name: tensor for part in gather(kinds(state)) for name, tensor in part.items()}
    check_tensors(ours, theirs, ckpt.path)
    on_all_ranks(lambda: fill(step, state, ckpt))


def load_model(step: Stateful, path: Path) -> None:
    """Load only parameters and buffers; those that the checkpoint omits, such as frozen ones, keep their values."""
    ckpt = opened(path)
    state = {name: placed for name, placed in state_of(step).items() if name in ckpt.index.tensors}
    check_tensors(kinds(state), {name: ckpt.index.tensors[name] for name in state}, ckpt.path)
    on_all_ranks(lambda: fill(step, state, ckpt))


def load_averaged(step: Stateful, path: Path) -> None:
    """Load parameters and buffers, with averages of weights in place of those that have one.

    Raises UserError if the checkpoint has no averages.
    """
    load_model(step, path)
    ckpt = opened(path)
    averages, state = averages_of(ckpt), state_of(step)
    averages_here = {name: dtype for name, dtype in averages.items() if name in state}  # without those of other stages
    on_all_ranks(lambda: fill_narrowed(step, averages_here, state, ckpt))


def read_model(path: Path) -> dict[str, Tensor]:
    """Return full parameters and buffers of a checkpoint, by the model's own names, in this process."""
    return read_named(opened_alone(path), MODEL)


def read_averaged(path: Path) -> dict[str, Tensor]:
    """Return full parameters and buffers, with averages of weights in place of those that have one.

    Raises UserError if the checkpoint has no averages.
    """
    ckpt = opened_alone(path)
    averages_of(ckpt)
    model, averages = read_named(ckpt, MODEL), read_named(ckpt, AVERAGE)
    return model | {name: average.to(model[name].dtype) for name, average in averages.items()}


def averages_of(ckpt: Checkpoint) -> dict[str, torch.dtype]:
    """Return the dtypes of a checkpoint's averages, by their weights' names; raise UserError if it has none."""
    tensors = ckpt.index.tensors
    dtypes = {
        f"{MODEL}{n.removeprefix(AVERAGE)}": DTYPE_BY_NAME[t.dtype] for n, t in tensors.items() if n.startswith(AVERAGE)
    }
    if not dtypes:
        raise UserError("--ema", f"{ckpt.path} has no averages of weights; train with train.ema=0.999")
    return dtypes


def read_named(ckpt: Checkpoint, kind: str) -> dict[str, Tensor]:
    """Return the full tensors whose names begin with `kind`, by the rest of their names."""
    tensors = {}
    for name, spec in ckpt.index.tensors.items():
        if name.startswith(kind):
            tensor = torch.empty(spec.shape, dtype=DTYPE_BY_NAME[spec.dtype])
            read_into([(((0,) * tensor.dim(), tuple(spec.shape)), tensor)], ckpt.pieces[name])
            tensors[name.removeprefix(kind)] = tensor
    return tensors


def fill(step: Stateful, state: Placed, ckpt: Checkpoint) -> None:
    """Read the parts that the ranks of this process hold; if files are on several machines, every rank calls this."""
    targets = {name: targets_of(step, *placed) for name, placed in state.items()}
    parts: Iterable[tuple[str, Sequence[Piece | Received]]] = ckpt.pieces.items()
    if ckpt.holders:
        parts = exchanged(ckpt, {name: overlapping(places, ckpt.pieces[name]) for name, places in targets.items()})
    damage = None
    for name, pieces in parts:
        try:
            read_into(targets.get(name, ()), pieces)
        except Damaged as error:  # other ranks need this one for the next pieces
            damage = damage or error
    if damage is not None:
        raise damage


def targets_of(step: Stateful, spec: Spec, local: Mapping[int, Tensor]) -> list[Target]:
    """Return the rectangles of a tensor that the ranks of this process hold."""
    return [
        ((box.offset, box.size), box.of_local(tensor))
        for rank, tensor in local.items()
        for box in boxes(spec, step.mesh, step.mesh.coordinates(rank))
    ]


def overlapping(targets: Sequence[Target], pieces: Sequence[Piece]) -> set[int]:
    """Return the numbers of the pieces that overlap targets."""
    return {n for n, piece in enumerate(pieces) if any(overlap(piece.place, place) is not None for place, _ in targets)}


def fill_narrowed(step: Stateful, averages: Mapping[str, torch.dtype], state: Placed, ckpt: Checkpoint) -> None:
    """Read averages in their own dtype, one at a time, into weights of another dtype."""
    for name, dtype in averages.items():
        spec, local = state[name]
        values = {rank: torch.zeros_like(weight, dtype=dtype) for rank, weight in local.items()}
        fill(step, {f"{AVERAGE}{name.removeprefix(MODEL)}": (spec, values)}, ckpt)
        for rank, weight in local.items():
            weight.copy_(values[rank])


def read_into(targets: Iterable[Target], pieces: Iterable[Piece | Received]) -> None:
    """Copy the overlaps of pieces and targets; each piece is read at most once."""
    targets = list(targets)
    for piece in pieces:
        common = [(slices, view) for place, view in targets if (slices := overlap(piece.place, place)) is not None]
        if common:
            entries = piece.read()
            for (in_piece, in_target), view in common:
                view[in_target].copy_(entries[in_piece])


def kinds(state: Placed) -> dict[str, FullTensor]:
    """Return dtype and shape of each full tensor."""
    dtypes = {name: next(iter(local.values())).dtype for name, (_, local) in state.items()}
    return {name: FullTensor(str(dtypes[name]).removeprefix("torch."), spec.shape) for name, (spec, _) in state.items()}


def check_tensors(ours: Mapping[str, FullTensor], theirs: Mapping[str, FullTensor], path: Path) -> None:
    """Raise UserError naming the first tensors that differ between the checkpoint and this job."""
    names = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
    differences = [
        f"{name} is {theirs.get(name, 'absent')} there and {ours.get(name, 'absent')} here" for name in names[:SHOWN]
    ]
    if names:
        more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        fix = "; keep model.*, optim.name, train.dtype and train.ema as they were"
        if any(f"{name}.scale" in names for name in names):  # blocks of moments in 8 bits
            fix += "; which moments have 8 bits depends on rows of a rank: keep mesh and optim.block, too"
        raise UserError(str(path), f"has other tensors: {'; '.join(differences)}{more}{fix}")


def on_all_ranks(action: Callable[[], T]) -> T:
    """Return the result of `action` on this rank; raise Damaged on every rank if it does so on one."""
    result: list[T] = []
    damage = None
    try:
        result.append(action())
    except Damaged as error:
        damage = error.place, error.message
    for error_args in gather(damage):
        if error_args is not None:
            raise Damaged(*error_args)
    return result[0]
