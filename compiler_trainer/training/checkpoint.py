"""Sharded checkpoints that any mesh can read, in the format of `torch.distributed.checkpoint`.

    checkpoints/step_00000010/  .metadata  __0_0.distcp  __1_0.distcp  state.json

A tensor is stored as the rectangles that the ranks own, at their offsets in the full tensor; a rank of another
mesh reads what its own rectangles overlap. Of copies on several ranks one is stored, chosen so that all ranks
have about as much to write. A checkpoint has its name only once it is complete: until then it is `*.tmp`.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from compiler_trainer.config.errors import UserError
from passes.program.mesh import Mesh
from passes.program.spec import Box, Spec, boxes

NAME = re.compile(r"step_(\d+)")
METADATA, EXTRA = ".metadata", "state.json"
MODEL = "model."  # how the names of parameters and buffers begin
SHOWN = 3  # differences named in an error


class Stateful(Protocol):
    """What a checkpoint is made of: the ranks that live in this process, and their local tensors."""

    mesh: Mesh
    ranks: tuple[int, ...]

    def tensors(self) -> dict[str, tuple[Spec, dict[int, Tensor]]]: ...


@dataclass(frozen=True)
class Pieces:
    """The rectangles of one tensor that this process holds, each with its view into a rank's local tensor."""

    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[tuple[Box, Tensor], ...]

    def chunks(self) -> list[ChunkStorageMetadata]:
        """Offset and size of each rectangle in the full tensor."""
        return [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box, _ in self.parts]

    def write_items(self, name: str) -> list[WriteItem]:
        """What to write: each rectangle once, though several ranks of this process may hold it."""
        properties = TensorProperties(self.dtype)
        items = {
            chunk.offsets: WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.chunks()
        }
        return list(items.values())


class SavePlanner(dcp.DefaultSavePlanner):
    """Plans the writing of `Pieces`; ranks that hold the same rectangle are told apart by PyTorch's own planner."""

    def create_local_plan(self) -> SavePlan:
        """Every rectangle of this process."""
        self.plan = SavePlan([item for name, pieces in self.state_dict.items() for item in pieces.write_items(name)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The view to write."""
        return next(view for box, view in self.state_dict[index.fqn].parts if box.offset == index.offset)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Plans the reading into `Pieces`, from whatever rectangles the checkpoint holds."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep `Pieces` as they are: the default accepts tensors only."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """The overlaps of every rectangle of this process with the stored ones."""
        assert self.metadata is not None
        stored: dict[str, Any] = self.metadata.state_dict_metadata
        return LoadPlan(
            [
                item
                for name, pieces in self.state_dict.items()
                for item in create_read_items_for_chunk_list(name, stored[name], pieces.chunks())
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The view to read into: `index.index` counts the rectangles of this process."""
        return self.state_dict[index.fqn].parts[index.index][1]


def save(
    step: Stateful, folder: Path, number: int, extra: Mapping[str, Any], keep: int, without: Set[str] = frozenset()
) -> Path:
    """Write `folder/step_<number>` with `extra` (JSON values) but `without` some tensors; keep so many, the newest.

    Every rank calls it, and has the checkpoint when it returns its path.
    """
    path = folder / f"step_{number:08d}"
    partial = path.with_suffix(".tmp")

    def publish() -> None:
        (partial / EXTRA).write_text(json.dumps(extra, indent=1) + "\n")
        os.rename(partial, path)
        for old in complete(folder)[:-keep]:
            discard(old)

    on_rank_0(step, lambda: clear(folder))
    with plain_errors("save", path):
        dcp.save(
            {name: pieces for name, pieces in pieces_of(step).items() if name not in without},
            storage_writer=dcp.FileSystemWriter(partial),
            planner=SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=is_alone(step),
        )
    on_rank_0(step, publish)
    return path


def load(step: Stateful, path: Path, may_lack: Set[str] = frozenset()) -> dict[str, Any]:
    """Fill the state of `step`, but for what it `may_lack`, from a checkpoint of any mesh; its `extra`.

    Every rank calls. Raises UserError, with nothing changed, where `path` is no complete checkpoint or one of other
    tensors.
    """
    extra, reader = read_extra(path), dcp.FileSystemReader(path)
    there = reader.read_metadata().state_dict_metadata
    state = {name: pieces for name, pieces in pieces_of(step).items() if name in there or name not in may_lack}
    check_tensors(state, there, path)
    read_into(state, reader, step, path)
    return extra


def read_into(state: dict[str, Pieces], reader: dcp.FileSystemReader, step: Stateful, path: Path) -> None:
    """Read the rectangles of every rank."""
    with plain_errors("load", path):
        dcp.load(
            state,
            storage_reader=reader,
            planner=LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=is_alone(step),
        )


def load_model(step: Stateful, path: Path) -> None:
    """Fill parameters and buffers alone; those that the checkpoint left out, as frozen, keep theirs."""
    reader = dcp.FileSystemReader(path)
    read_extra(path)
    there = reader.read_metadata().state_dict_metadata
    state = {name: pieces for name, pieces in pieces_of(step).items() if name in there}
    check_tensors(state, {name: there[name] for name in state}, path)
    read_into(state, reader, step, path)


def read_model(path: Path) -> dict[str, Tensor]:
    """Full parameters and buffers of a complete checkpoint, by the model's own names, in this process."""
    read_extra(path)
    reader = dcp.FileSystemReader(path)
    stored = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(MODEL)
    }
    with plain_errors("load", path):
        dcp.load(stored, storage_reader=reader, no_dist=True)
    return {name.removeprefix(MODEL): tensor for name, tensor in stored.items()}


def read_extra(path: Path) -> dict[str, Any]:
    """What was saved beside the tensors; raises UserError where `path` is no complete checkpoint."""
    if not is_complete(path):
        found = f"; it holds {', '.join(p.name for p in complete(path))}: name one" if complete(path) else ""
        raise UserError(str(path), f"is no complete checkpoint (it lacks {METADATA} or {EXTRA}){found}")
    return json.loads((path / EXTRA).read_text())


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`, None if there is none."""
    return max(complete(folder), key=number_of, default=None)


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, by step."""
    return sorted((p for p in folder.glob("step_*") if NAME.fullmatch(p.name) and is_complete(p)), key=number_of)


def is_complete(path: Path) -> bool:
    """Whether `path` is a checkpoint whose writing came to its end."""
    return path.suffix != ".tmp" and (path / METADATA).is_file() and (path / EXTRA).is_file()


def number_of(path: Path) -> int:
    """The step in the name of a checkpoint."""
    return int(path.name.removeprefix("step_"))


def discard(path: Path) -> None:
    """Delete a checkpoint so that what an interruption leaves does not look like one."""
    partial = path.with_suffix(".tmp")
    os.rename(path, partial)
    shutil.rmtree(partial)


def clear(folder: Path) -> None:
    """Delete what interrupted saves left."""
    for partial in folder.glob("step_*.tmp"):
        shutil.rmtree(partial)


def pieces_of(step: Stateful) -> dict[str, Pieces]:
    """The state of this process by name; a tensor without entries has nothing to store."""
    return {
        name: pieces(spec, step.mesh, local) for name, (spec, local) in step.tensors().items() if math.prod(spec.shape)
    }


def pieces(spec: Spec, mesh: Mesh, local: Mapping[int, Tensor]) -> Pieces:
    """The rectangles of one tensor, from the local tensor of each rank here."""
    if spec.partial:
        raise ValueError(f"a partial sum is not state: {spec}")
    parts = tuple(
        (box, box.of_local(tensor))
        for rank, tensor in local.items()
        for box in boxes(spec, mesh, mesh.coordinates(rank))
    )
    return Pieces(torch.Size(spec.shape), next(iter(local.values())).dtype, parts)


def check_tensors(state: Mapping[str, Pieces], metadata: Mapping[str, Any], path: Path) -> None:
    """Raise UserError naming the first tensors that differ between the checkpoint and this job."""
    here = {name: describe(pieces.shape, pieces.dtype) for name, pieces in state.items()}
    there = {
        name: describe(stored.size, stored.properties.dtype)
        for name, stored in metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    differences = [
        f"{name} is {there.get(name, 'absent')} in it and {here.get(name, 'absent')} here"
        for name in dict.fromkeys([*here, *there])
        if here.get(name) != there.get(name)
    ]
    if differences:
        more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        fix = "; keep model.*, optim.name and train.dtype as they were"
        raise UserError(str(path), f"holds other tensors: {'; '.join(differences[:SHOWN])}{more}{fix}")


def describe(shape: torch.Size, dtype: torch.dtype) -> str:
    """`float32[7, 4]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def is_alone(step: Stateful) -> bool:
    """Whether all ranks live in this process."""
    return len(step.ranks) == step.mesh.world_size


def on_rank_0(step: Stateful, action: Callable[[], None]) -> None:
    """Run `action` where rank 0 lives; returns once it is done, on every rank."""
    if 0 in step.ranks:
        action()
    if not is_alone(step):
        dist.barrier()


@contextmanager
def plain_errors(what: str, path: Path) -> Iterator[None]:
    """Raise RuntimeError for PyTorch's CheckpointException, which is no Exception; one process needs no warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except dcp.CheckpointException as error:
            causes = ", ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in error.failures.items())
            raise RuntimeError(f"cannot {what} checkpoint {path}: {causes}") from error
