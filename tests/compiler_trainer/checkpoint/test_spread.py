"""Checkpoints in the memories of machines: whichever machine is lost, the others have every file."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from stored_state import assert_same, blank, build, state_at

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint.spread import neighbour
from compiler_trainer.config.schema import CheckpointConfig

STEP = "step_00000002"


@pytest.mark.parametrize(("machines", "neighbours"), [
    ([0, 0, 0], [None] * 3),
    ([0, 0, 1, 1], [2, 3, 0, 1]),
    ([4, 4, 4, 2, 7, 7], [3, 3, 3, 4, 0, 1]),
])
def test_files_go_to_the_next_machine(machines, neighbours):
    assert [neighbour(rank, machines) for rank in range(len(machines))] == neighbours


def in_job(rank, folder, machines, check, arguments):
    """Call `check` on a rank of a job on some machines, each of which has a folder."""
    here = [r for r, machine in enumerate(machines) if machine == machines[rank]]
    os.environ |= {"LOCAL_RANK": str(here.index(rank)), "LOCAL_WORLD_SIZE": str(len(here))}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(machines))
    check(rank, folder / str(machines[rank]), machines, *arguments)
    dist.destroy_process_group()


def job(folder, machines, check, *arguments):
    (folder / "rendezvous").unlink(missing_ok=True)
    mp.spawn(in_job, (folder, machines, check, arguments), nprocs=len(machines))


def write(rank, folder, machines, layout):
    if machines.index(machines[rank]) == rank:
        checkpoint.link_to_run(folder, folder.parent / "checkpoints")
    step = build(layout, ranks=(rank,))
    with checkpoint.Saver(step, folder, CheckpointConfig(keep=1), machines=machines) as saver:
        for number in (1, 2):
            saver.save(state_at(number))


def read(rank, folder, machines, layout):
    result = blank(layout, (rank,))
    checkpoint.load(result, checkpoint.opened_on_machines(folder / STEP))
    assert_same(result, build(layout, ranks=(rank,)))


def find_damage(rank, folder, machines, layout, problem):
    with pytest.raises(checkpoint.Damaged, match=problem):
        checkpoint.load(blank(layout, (rank,)), checkpoint.opened_on_machines(folder / STEP))


@pytest.fixture(scope="module")
def memories(tmp_path_factory):
    """Return the folders of three machines with four ranks, after two checkpoints."""
    folder = tmp_path_factory.mktemp("memories")
    job(folder, [0, 0, 1, 2], write, "two axes, one dim")
    return folder


@pytest.fixture
def copies(memories, tmp_path):
    for machine in "012":
        shutil.copytree(memories / machine, tmp_path / machine, symlinks=True)
    return tmp_path


@pytest.mark.full
def test_each_machine_has_its_files_and_those_of_the_one_before(memories):
    files = {machine: sorted(int(p.stem[-1]) for p in (memories / machine / STEP).glob("rank_*")) for machine in "012"}
    assert files == {"0": [0, 1, 3], "1": [0, 1, 2], "2": [2, 3]}
    assert all([p.name for p in checkpoint.complete(memories / machine)] == [STEP] for machine in "012")


@pytest.mark.full
@pytest.mark.parametrize(("lost", "machines", "layout"), [
    ("1", [0, 0, 2], "three"), ("0", [1, 2], "two"), ("2", [0, 1, 0, 1], "hybrid"), ("0", [7, 1, 2, 7], "two axes, one dim"),
])
def test_a_lost_machine_is_read_from_its_neighbour(lost, machines, layout, copies):
    """Machine 7 is a new one, whose memory is empty."""
    shutil.rmtree(copies / lost)
    job(copies, machines, read, layout)


@pytest.mark.full
def test_two_lost_neighbours_have_taken_files_with_them(copies):
    job(copies, [1, 1], find_damage, "two", "lacks rank_00003.safetensors, which was on machines that are lost")


@pytest.mark.full
def test_a_changed_piece_is_damage_on_all_ranks(copies):
    shutil.rmtree(copies / "0")
    for file in copies.glob(f"[12]/{STEP}/rank_00002.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    job(copies, [1, 2], find_damage, "two", "was changed: its SHA-256 differs")


@pytest.mark.full
def test_the_same_step_of_an_earlier_round_is_not_mixed_in(copies):
    """A machine without a part in the last round has a snapshot of the same step, of another mesh."""
    job(copies, [1, 2], write, "two")
    job(copies, [1, 2, 0], read, "three")


@pytest.mark.parametrize(("order", "is_whole"), [("12", True), ("20", True), ("2", False)])
def test_the_last_machine_that_brings_files_publishes_the_checkpoint(order, is_whole, copies):
    for machine in "012":
        (copies / machine / "run").unlink()
        checkpoint.link_to_run(copies / machine, copies / "checkpoints")
    for machine in order:
        assert not (copies / "checkpoints" / STEP).exists()
        checkpoint.bring_to_run(copies / machine)
    assert [p.name for p in checkpoint.complete(copies / "checkpoints")] == [STEP] * is_whole
    if is_whole:
        result = blank("three")
        checkpoint.load(result, checkpoint.opened(copies / "checkpoints" / STEP))
        assert_same(result, build("three"))
        checkpoint.check(copies / "checkpoints" / STEP)


def test_without_a_run_nothing_is_brought(tmp_path):
    checkpoint.bring_to_run(tmp_path)
    assert not [*tmp_path.iterdir()]
