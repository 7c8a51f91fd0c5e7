"""Edges of a run: options that cannot be stored, other runs' checkpoints, slow disks, batches without labels."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from short_runs import options

from compiler_trainer import UserError
from compiler_trainer.checkpoint.save import DeletableCheckpoints
from compiler_trainer.config.schema import CheckpointConfig, Config, EvalConfig
from compiler_trainer.data.datasets import DatasetRows, check_same_entries
from compiler_trainer.data.ids import HEADER, MAGIC, read_indexed
from compiler_trainer.models.subject import subject
from compiler_trainer.runs.saved import check_names
from compiler_trainer.training.callbacks import Callback
from compiler_trainer.training.checkpoints import check_storable
from compiler_trainer.training.evaluate import means
from compiler_trainer.training.loggers import Progress
from compiler_trainer.training.owner import Owners
from compiler_trainer.training.trainer import train


@pytest.mark.parametrize("value", [float("inf"), float("nan"), Path("x")], ids=repr)
def test_an_option_that_no_checkpoint_can_hold_is_refused_before_training(value):
    cfg = replace(Config(), optim=replace(Config().optim, arguments={"limit": value}))
    with pytest.raises(UserError, match=r"^optim.arguments.limit: .* cannot be stored in a checkpoint; give it as text"):
        check_storable(cfg)
    check_storable(replace(cfg, checkpoint=CheckpointConfig(interval=None)))


def test_only_checkpoints_of_the_run_are_deleted(tmp_path):
    for step in (2, 4):
        (tmp_path / f"step_{step:08}").mkdir()
        (tmp_path / f"step_{step:08}" / "index.json").write_text("{}")
    assert DeletableCheckpoints(tmp_path, "auto").steps == DeletableCheckpoints(tmp_path).steps == {2, 4}
    assert DeletableCheckpoints(tmp_path, str(tmp_path / "step_00000002")).steps == {2, 4}
    assert DeletableCheckpoints(tmp_path, str(tmp_path / "elsewhere" / "step_00000002")).steps == set()


SLOW = """
import sys, time
from pathlib import Path
from concurrent.futures import ThreadPoolExecutor
from compiler_trainer.checkpoint import save
from compiler_trainer.checkpoint.save import Saver
from compiler_trainer.training.failures import Watch

folder = Path(sys.argv[1])
(folder / "step_00000002.tmp").mkdir(parents=True)
save.PROGRESS_S = 0.05

def write():
    with open(folder / "step_00000002.tmp" / "a", "wb", buffering=0) as file:
        for _ in range(int(sys.argv[2])):
            file.write(bytes(100))
            time.sleep(0.1)
    time.sleep(float(sys.argv[3]))
    return ""

saver = object.__new__(Saver)
saver.folder, saver.pending = folder, ThreadPoolExecutor(1).submit(write)
with Watch(0.8, Path("watched")):
    saver.wait()
print("done", flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize(("writes", "hangs_s", "code"), [("25", "0", 0), ("1", "30", 1)], ids=["slow", "hangs"])
def test_a_checkpoint_that_is_being_written_is_progress(tmp_path, writes, hangs_s, code):
    job = subprocess.run([sys.executable, "-c", SLOW, str(tmp_path / "c"), writes, hangs_s], capture_output=True, text=True, timeout=120)
    assert job.returncode == code, job.stderr


def test_no_checkpoint_is_announced_that_is_not_saved(tmp_path):
    class Seen(Callback):
        paths: list[Path] = []

        def on_checkpoint(self, run, path):
            self.paths.append(path)

    cfg = options(tmp_path / "run", 2, checkpoint=CheckpointConfig(interval=None), eval=EvalConfig(interval=None))
    train(cfg, callbacks=[seen := Seen()])
    assert not seen.paths


def test_the_time_left_is_known_after_a_rollback_before_the_start():
    progress = Progress(200, 100)
    record = {"tokens_per_s": 1.0, "lr": 1e-3, "loss": 1.0}
    for step in (101, 99, 100):
        progress.show({"step": step, **record})
        assert " left" in progress.line({"step": step, **record})
    assert "  1 tokens/s  2.5 images/s  " in progress.line({"step": 100, "images_per_s": 2.5, **record})


class Measured:
    def measure(self, batch):
        has_label = batch["labels"] != -100
        return {"loss": float(batch["labels"].clamp(min=0).sum() / has_label.sum())}

    def weights(self, batch):
        return {}

    def total(self, values):
        return values.sum()


def test_a_batch_without_labels_does_not_make_the_mean_nan():
    labelled, unlabelled = ("a", {"labels": torch.tensor([[1, 2]])}), ("a", {"labels": torch.full((1, 2), -100)})
    assert means(Measured(), [labelled, unlabelled]) == ({"loss": 1.5}, 2)
    with pytest.raises(UserError, match="^eval: no sequence of the validation data has a label"):
        means(Measured(), [unlabelled])


def test_a_folder_for_run_and_checkpoints_is_locked_once(tmp_path):
    cfg = options(tmp_path / "run", 2, checkpoint=CheckpointConfig(dir=str(tmp_path / "run")))
    owners = Owners(cfg)
    owners.take()
    owners.leave()


def test_a_truncated_bin_is_refused(tmp_path):
    ids, sizes = np.arange(1, 21, dtype="<u2"), np.full(4, 5, "<i4")
    index = HEADER.pack(MAGIC, 1, 8, 4, 5) + sizes.tobytes() + (np.arange(4) * 10).astype("<i8").tobytes()
    (tmp_path / "a.idx").write_bytes(index + np.arange(5).astype("<i8").tobytes())
    path = str(tmp_path / "a.bin")
    Path(path).write_bytes(ids.tobytes())
    assert [len(record.read().content) for record in read_indexed(path, path, 0, 4)] == [5] * 4
    Path(path).write_bytes(ids.tobytes()[:24])
    with pytest.raises(UserError, match="a.bin has 24 of 40 bytes; it was truncated"):
        list(read_indexed(path, path, 0, 4))


class Rows:
    def __init__(self, *names):
        self.names = names

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return {"tokens": torch.full((4,), number), **{name: torch.ones(4) for name in self.names}}


def test_sources_of_a_mixture_have_the_same_entries():
    a, b = (DatasetRows(Rows(*names), np.arange(8), 4, "x") for names in (("weight",), ()))
    check_same_entries({"first": a, "second": DatasetRows(Rows("weight"), np.arange(8), 4, "y")})
    with pytest.raises(UserError, match="^data.sources: the rows of second have .*, those of first .*weight.*; give both the same entries"):
        check_same_entries({"first": a, "second": b})


def test_a_checkpoint_of_another_model_is_refused():
    trained = subject(Config())
    names = [name for name, _ in trained.module.named_parameters()]
    check_names(names, trained)
    with pytest.raises(UserError, match="^model: the checkpoint lacks layers.0.* and .* more: it is of another model"):
        check_names([name for name in names if not name.startswith("layers.0.")], trained)
    with pytest.raises(UserError, match="^model: the checkpoint has layers.99.weight: it is of another model"):
        check_names([*names, "layers.99.weight"], trained)

