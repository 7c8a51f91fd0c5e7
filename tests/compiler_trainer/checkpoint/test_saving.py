"""Asynchronous saving: copies, names on disk, checkpoints that stay, and failures."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stored_state import FULL, assert_same, blank, build, saved, state_at

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import SaveError, Saver, listing, save
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import CheckpointConfig


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_what_is_saved_is_what_was_there_while_training_goes_on(tmp_path, monkeypatch):
    go, write = threading.Event(), save.write_files
    monkeypatch.setattr(save, "write_files", lambda *args: go.wait() and write(*args))
    step = build("two")
    with Saver(step, tmp_path, CheckpointConfig()) as saver:
        saver.save(state_at(1))
        for _, local in step.tensors().values():
            for tensor in local.values():
                tensor.zero_()
        assert checkpoint.complete(tmp_path) == []  # the save waits while this code runs
        go.set()
    result = blank("two")
    checkpoint.load(result, checkpoint.opened(checkpoint.complete(tmp_path)[-1]))
    assert_same(result, build("two"))


def test_a_save_waits_for_the_one_before(tmp_path, monkeypatch):
    publish, seen = save.publish, []
    monkeypatch.setattr(save, "publish", lambda partial, path, *rest: seen.append(path.name) or publish(partial, path, *rest))
    step = build("one")
    with Saver(step, tmp_path, CheckpointConfig()) as saver:
        for number in (1, 2, 3):
            saver.save(state_at(number))
            assert len(seen) >= number - 1
    assert seen == names(tmp_path)[:0] + ["step_00000001", "step_00000002", "step_00000003"]


def test_all_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    sync, rename, done = os.fsync, os.rename, []
    name_of = lambda handle: os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))  # noqa: E731
    monkeypatch.setattr(os, "fsync", lambda handle: done.append(name_of(handle)) or sync(handle))
    monkeypatch.setattr(os, "rename", lambda here, there: done.append("its name") or rename(here, there))
    saved(build("two"), tmp_path / "run")
    partial = "step_00000003.tmp"
    files = ["rank_00000.safetensors", "rank_00001.safetensors", partial, "index.json", partial]
    assert done == ["run", tmp_path.name, *files, "its name", "run"]


# Checkpoints that stay


def test_latest_is_the_highest_step(tmp_path):
    assert checkpoint.complete(tmp_path / "absent") == []
    for number in (9, 10, 100_000_000):
        path = saved(build("one"), tmp_path, number)
        assert checkpoint.complete(tmp_path)[-1] == path
    assert path.name == "step_100000000"


def test_keep_deletes_the_oldest(tmp_path):
    for number in (1, 2, 3, 4):
        saved(build("two"), tmp_path, number, keep=2)
    assert names(tmp_path) == ["step_00000003", "step_00000004"]


@pytest.mark.parametrize(("options", "stay"), [
    ({"keep": 2}, {50, 60}),
    ({"keep": 1, "keep_every": 20}, {20, 40, 60}),
    ({"keep": 1, "keep_best": 2}, {20, 50, 60}),
    ({"keep": 1, "keep_best": 3}, {20, 30, 50, 60}),
    ({"keep": 1, "keep_every": 30, "keep_best": 1}, {30, 20, 60}),
    ({"keep": 9}, {10, 20, 30, 40, 50, 60}),
])
def test_the_newest_every_nth_and_the_best_are_kept(options, stay):
    result = [(10, 3.0), (20, 1.0), (30, 2.0), (40, None), (50, 2.0), (60, 9.0)]
    assert listing.steps_to_keep(result, CheckpointConfig(**options)) == stay


def test_the_best_is_found_by_what_the_checkpoints_say(tmp_path):
    cfg = CheckpointConfig(keep=1, keep_best=1)
    with Saver(build("one"), tmp_path, cfg) as saver:
        for number, loss in enumerate((3.0, 1.0, None, 2.0), start=1):
            saver.save(state_at(number, eval_loss=loss))
    assert names(tmp_path) == ["step_00000002", "step_00000004"]


def test_what_another_run_wrote_stays_where_a_link_leads_there_and_what_was_just_written_too(tmp_path):
    other, mine, output = tmp_path / "other", tmp_path / "mine", []
    for number in (7, 50, 60):
        saved(build("one"), other, number, keep=9)
    (other / "step_00000070.tmp").mkdir()  # being saved
    with Saver(build("one"), mine, CheckpointConfig(keep=1), tell=output.append) as saver:
        for number in (5, 6):
            saver.save(state_at(number))
        saver.wait()
        assert names(mine) == ["step_00000006"]
        mine.rename(tmp_path / "before")
        mine.symlink_to(other)
        for number in (7, 8, 9):
            saver.save(state_at(number))
    assert names(other) == ["step_00000007", "step_00000009", "step_00000050", "step_00000060", "step_00000070.tmp"]
    assert len(output) == 1 and "another run's checkpoint of that step is there" in output[0]


# Failures


MOMENTS = {"files": "write_files", "index": "encode", "folder": "make_empty", "flush": "flush"}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_save_that_fails_leaves_what_is_there_and_the_next_is_another_try(moment, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    first, output = saved(build("two"), tmp_path, 1), []
    with Saver(build("two"), tmp_path, CheckpointConfig(), tell=output.append) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(save, MOMENTS[moment], fail)
            saver.save(state_at(2))
            reason = saver.wait()
        assert names(tmp_path) == [first.name] and output == [reason]
        assert reason == f"cannot save {tmp_path / 'step_00000002'}: rank 0: OSError: [Errno 28] No space left on device"
        saver.save(state_at(3))
    assert names(tmp_path) == [first.name, "step_00000003"]
    checkpoint.check(tmp_path / "step_00000003")


def test_a_disk_is_not_filled_up(tmp_path, monkeypatch):
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    size = sum(full.nbytes for full in FULL.values())
    with pytest.raises(SaveError, match=rf"No space left on device: {size:,} bytes are needed, 100 free"):
        saved(build("two"), tmp_path)
    assert names(tmp_path) == []


def test_if_the_last_save_failed_that_is_how_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(save, "write_files", lambda *args: 1 / 0)
    with pytest.raises(SaveError, match="cannot save .*step_00000002: rank 0: ZeroDivisionError"):
        saved(build("one"), tmp_path, 2)
    with pytest.raises(KeyError), Saver(build("one"), tmp_path, CheckpointConfig()) as saver:
        saver.save(state_at(2))
        raise KeyError  # the first error is raised


def test_what_an_interruption_left_is_no_checkpoint_and_goes_with_the_next_save(tmp_path):
    path = saved(build("one"), tmp_path, 2)
    path.rename(tmp_path / "step_00000002.tmp")
    assert checkpoint.complete(tmp_path) == []
    saved(build("one"), tmp_path, 3)
    assert names(tmp_path) == ["step_00000003"]


def test_one_that_lost_its_index_is_damaged_and_written_over(tmp_path):
    first, second = (saved(build("one"), tmp_path, number) for number in (1, 2))
    (second / "index.json").unlink()
    assert [(path, is_whole) for path, _, is_whole in checkpoint.check_all(tmp_path)] == [(first, True), (second, False)]
    saved(build("one"), tmp_path, 2)
    checkpoint.check(second)


# Checks


def test_every_checkpoint_of_a_folder_gets_its_line(tmp_path):
    for number in (1, 2):
        saved(build("two"), tmp_path / "checkpoints", number)
    file = tmp_path / "checkpoints/step_00000001/rank_00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    result = list(checkpoint.check_all(tmp_path))
    assert [(path.name, is_whole) for path, _, is_whole in result] == [("step_00000001", False), ("step_00000002", True)]
    assert result[0][1].startswith(f"{file}: has ") and result[1][1] == "9 tensors in 2 files, 0.0 MiB"
    assert list(checkpoint.check_all(tmp_path / "checkpoints")) == result
    assert list(checkpoint.check_all(tmp_path / "checkpoints/step_00000002")) == result[1:]
    with pytest.raises(UserError, match="is not a checkpoint"):
        list(checkpoint.check_all(tmp_path / "nowhere"))


@pytest.mark.parametrize("block", [1 << 30, 256])
def test_memory_is_taken_once_and_is_what_a_rank_writes(block, monkeypatch):
    monkeypatch.setattr("compiler_trainer.checkpoint.staging.BLOCK", block)
    staging = Saver(build("two"), Path("none"), CheckpointConfig()).staging
    addresses = [copy.data_ptr() for copy in staging.copies]
    staging.copy(build("two").tensors())
    assert [copy.data_ptr() for copy in staging.copies] == addresses
    sizes = sum(t.nbytes for of_rank in staging.pieces.values() for t in of_rank.values())
    assert sizes <= staging.bytes < sizes + 64 * len(staging.sources)
    assert all(torch.equal(a, b) for a, b in zip(staging.copies, (s.box.of_local(build("two").state[s.name][1][s.rank]) for s in staging.sources)) if a.dtype != torch.float8_e4m3fn)


def test_files_that_vanish_while_they_are_counted_count_as_none(tmp_path, monkeypatch):
    folder = tmp_path / "step_1.tmp"
    folder.mkdir()
    for name in "abc":
        (folder / name).write_bytes(bytes(10))
    stat = Path.stat

    def vanishing(path, **options):
        if path.name in "abc":
            path.unlink()
        return stat(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", vanishing)
        assert save.written_bytes(tmp_path) == 0
    assert save.written_bytes(tmp_path) == 20  # a step later
