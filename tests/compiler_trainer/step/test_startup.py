"""The work of a rank of a large job before its first step does not grow with the ranks; nothing is started.

The programs are compiled as in a dry run. A rank's own code makes its process groups, with `new_group` replaced by a
counter; its weights and its pieces of checkpoints follow from the placements.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from math import prod
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from compiler_trainer.checkpoint.pieces import Placed, overlap, written_by
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.device import for_predicting
from compiler_trainer.config.schema import LowerConfig
from compiler_trainer.config.validate import dry_world_size, validate
from compiler_trainer.models.subject import subject
from compiler_trainer.planning.dry import request_of
from compiler_trainer.step import runtime
from compiler_trainer.step.captured import mesh_of
from compiler_trainer.step.programs import compile_programs
from compiler_trainer.step.runtime import ProcessRanks
from compiler_trainer.step.step import state_name, stored
from passes.ir.spec import boxes

OPTIONS = ("mesh.tp=2", "cluster=h100", "passes.verify=none", "train.microbatches=2", "mesh.pp=2")
RANK = 0  # of the first stage


class Start(NamedTuple):
    """The work of a rank: calls of `new_group`, entries that it draws of those of the model, files that it reads."""

    groups: int
    drawn: int
    entries: int
    files: int


def start_of(*overrides) -> Start:
    cfg = to_config(compose([*OPTIONS, *overrides]))
    cfg = validate(for_predicting(cfg), dry_world_size(cfg))
    mesh, compiled = mesh_of(cfg.mesh), compile_programs(request_of(cfg, subject(cfg))).programs
    programs = {name: program for name, (program, _) in compiled.items()}
    stages = {name: each.task.stage for name, each in programs.items()}
    placements = {}
    for name in sorted(programs, key=stages.get, reverse=True):  # a parameter of several stages is of the first
        inputs = [x for x in programs[name].inputs if x.kind == "parameter"]
        placements |= {state_name(x): (stored(x), stages[name]) for x in inputs}
    here = {name: spec for name, (spec, stage) in placements.items() if stage == 0}
    flat = next(iter(programs.values())).mesh  # of a stage
    stored_here = {name: boxes(spec, flat, flat.coordinates(RANK)) for name, spec in here.items()}
    drawn = sum(prod(box.size) for several in stored_here.values() for box in several)
    entries = sum(prod(spec.shape) for spec, _ in placements.values())
    return Start(groups_of(mesh, programs), drawn, entries, files_read(here, stored_here, flat))


def groups_of(mesh, programs) -> int:
    """Return the number of groups that the rank makes, without the group of all ranks."""
    groups = []
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}))
        for name, value in (("is_initialized", True), ("get_rank", RANK), ("get_world_size", mesh.world_size)):
            stack.enter_context(patch.object(dist, name, lambda value=value: value))
        stack.enter_context(patch.object(runtime, "new_group", lambda members=None, backend=None: groups.append(members)))
        stack.enter_context(patch.object(runtime, "agree", lambda name, program: None))
        ProcessRanks(mesh, LowerConfig(), torch.device("cpu"), lambda what: None).meet(programs)
    return len(groups)


def files_read(specs, stored_here, mesh) -> int:
    """Return the number of files that the rank reads on the mesh that wrote them: those with a piece of its state."""
    state: Placed = {name: (spec, dict.fromkeys(range(mesh.world_size), torch.empty(0))) for name, spec in specs.items()}
    pieces = {writer: written_by(writer, state, mesh) for writer in range(mesh.world_size)}
    return sum(
        any(overlap((piece.offset, piece.size), (box.offset, box.size)) for name, piece in wrote for box in stored_here[name])
        for wrote in pieces.values()
    )


@pytest.fixture(scope="module")
def large():
    """Return the work in a job of 4,096 ranks."""
    return start_of("mesh.dp_shard=1024", "train.global_batch_size=2048")


@pytest.mark.full
def test_groups_do_not_grow_with_the_ranks(large):
    assert large.groups == start_of("mesh.dp_shard=2", "train.global_batch_size=8").groups < 10


@pytest.mark.full
def test_a_rank_draws_and_reads_its_share(large):
    assert large.entries / 4096 <= large.drawn < large.entries / 1024
    assert 1 <= large.files <= 8
