"""Count the work of a rank of a large job before its first step, without starting it: groups, files, random numbers.

    python -m tools.startup                                        # Llama 3 405B on 16,384 ranks
    python -m tools.startup model=llama3_8b mesh.pp=1 mesh.dp_shard=64 mesh.tp=1

The programs are compiled as in a dry run. A rank's own code makes its process groups, with `new_group` replaced by a
counter; its weights and its pieces of checkpoints follow from the placements.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from compiler_trainer.checkpoint.pieces import Placed, overlap, written_by
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import for_predicting
from compiler_trainer.config.schema import Config, LowerConfig
from compiler_trainer.config.validate import dry_world_size, validate
from compiler_trainer.models.subject import subject
from compiler_trainer.planning.dry import request_of
from compiler_trainer.step import runtime
from compiler_trainer.step.captured import mesh_of
from compiler_trainer.step.programs import compile_programs
from compiler_trainer.step.runtime import ProcessRanks, all_calls
from compiler_trainer.step.step import state_name, stored
from passes.ir import ir
from passes.ir.mesh import Mesh
from passes.ir.operators import axis_of, communicator_of
from passes.ir.spec import Spec, boxes

LARGE = (
    "model=llama3_405b", "data=synthetic", "mesh.pp=16", "mesh.dp_shard=128", "mesh.tp=8", "train.microbatches=32",
    "train.global_batch_size=4096", "passes.verify=none", "cluster=h100",
)  # fmt: skip
PER_MACHINE = 8
DRAWN_BYTES = 4  # of an entry, in float32


@dataclass
class Groups:
    """The sizes of the groups that a rank makes, and the seconds it takes to list the members."""

    sizes: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, members: Sequence[int] | None = None, backend: str | None = None) -> None:
        """Count a group in place of `new_group`."""
        self.sizes.append(dist.get_world_size() if members is None else len(members))


def groups_of(rank: int, mesh: Mesh, programs: Mapping[str, ir.Program]) -> Groups:
    """Return the groups that a rank of a job makes when it starts, without the group of all ranks."""
    groups = Groups()
    machine = {"LOCAL_RANK": str(rank % PER_MACHINE), "LOCAL_WORLD_SIZE": str(PER_MACHINE)}
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, machine))
        for name, value in (("is_initialized", True), ("get_rank", rank), ("get_world_size", mesh.world_size)):
            stack.enter_context(patch.object(dist, name, lambda value=value: value))
        stack.enter_context(patch.object(runtime, "new_group", groups.add))
        stack.enter_context(patch.object(runtime, "agree", lambda name, program: None))
        began = time.perf_counter()
        ProcessRanks(mesh, LowerConfig(), torch.device("cpu"), lambda what: None).meet(programs)
        groups.seconds = time.perf_counter() - began
    return groups


def groups_by_all(mesh: Mesh, programs: Mapping[str, ir.Program]) -> int:
    """Return the number of `new_group` calls if every rank calls for every group of an axis, members or not."""
    axis_of_communicator = {
        communicator_of(node): axis_of(node) for program in programs.values() for node in all_calls(program)
    }
    axes = [axis for name, axis in axis_of_communicator.items() if name is not None and axis is not None]
    calls = sum(mesh.world_size // mesh[axis] for axis in axes)
    if mesh["pp"] > 1:
        calls += 2 + mesh.world_size // mesh["pp"] + mesh["pp"]  # two directions, neighbour stages, ranks of a stage
    return calls


def parameters_of(programs: Mapping[str, ir.Program], stage_of: Mapping[str, int]) -> dict[str, tuple[Spec, int]]:
    """Return the placement and the first stage of each parameter."""
    placements: dict[str, tuple[Spec, int]] = {}
    for name, program in programs.items():
        for program_input in program.inputs:
            if program_input.kind == "parameter":
                first = placements.setdefault(state_name(program_input), (stored(program_input), stage_of[name]))
                placements[state_name(program_input)] = first[0], min(first[1], stage_of[name])
    return placements


def entries_of(spec: Spec, mesh: Mesh, rank: int) -> int:
    """Return the number of entries of a tensor that a rank of a stage stores, without padding."""
    return sum(prod(box.size) for box in boxes(spec, mesh, mesh.coordinates(rank)))


def files_read(rank: int, specs: Mapping[str, Spec], mesh: Mesh) -> int:
    """Return the number of files that a rank reads on the mesh that wrote them: those with a piece of its state."""
    example = torch.empty(0, dtype=torch.float32)
    state: Placed = {name: (spec, dict.fromkeys(range(mesh.world_size), example)) for name, spec in specs.items()}
    wanted_boxes = {name: boxes(spec, mesh, mesh.coordinates(rank)) for name, spec in specs.items()}

    def is_read(writer: int) -> bool:
        for name, piece in written_by(writer, state, mesh):
            place = piece.offset, piece.size
            if any(overlap(place, (box.offset, box.size)) is not None for box in wanted_boxes[name]):
                return True
        return False

    return sum(map(is_read, range(mesh.world_size)))


def rows(cfg: Config, rank: int = 0) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of a quantity, its value if each rank does everything, and its value for a rank of stage 0."""
    trained, mesh = subject(cfg), mesh_of(cfg.mesh)
    compiled = compile_programs(request_of(cfg, trained))
    programs = {name: program for name, (program, _) in compiled.programs.items()}
    flat = next(iter(programs.values())).mesh  # of a stage
    stage_of = {name: each.task.stage if each.task and mesh["pp"] > 1 else 0 for name, each in programs.items()}
    groups = groups_of(rank, mesh, programs)
    yield "`new_group` calls of a rank", groups_by_all(mesh, programs), len(groups.sizes)
    yield "largest of these groups, ranks", "", max(groups.sizes, default=0)
    yield "seconds to list their members", "", f"{groups.seconds:.2f}"
    placements = parameters_of(programs, stage_of)
    total = sum(prod(spec.shape) for spec, _ in placements.values())
    here = {name: spec for name, (spec, stage) in placements.items() if stage == 0}
    share = sum(entries_of(spec, flat, rank) for spec in here.values())
    yield "numbers that a rank draws", total, share
    yield "bytes that it draws", total * DRAWN_BYTES, share * DRAWN_BYTES
    ranks = mesh.world_size
    yield "checkpoint headers that a rank reads", ranks, -(-ranks // ranks)
    yield "headers that all ranks read", ranks * ranks, ranks
    yield "files with pieces that it reads", "", files_read(rank, here, flat)


def main(overrides: Sequence[str]) -> int:
    """Print the counts; return the exit code."""
    cfg = to_config(compose(overrides or LARGE))
    cfg = validate(for_predicting(cfg), dry_world_size(cfg))
    for name, before, after in rows(cfg):
        print(f"{name:40} {before:>24,} {after:>20}" if isinstance(before, int) else f"{name:40} {'':24} {after:>20}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
