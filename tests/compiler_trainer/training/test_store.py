"""Runs that read from and save to an object store: killed, resumed on another machine, and during an outage."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import call
from short_runs import metrics, options, timeless

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import RemoteCheckpoints, SaveError, sender
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import CheckpointConfig, DataConfig
from compiler_trainer.places.store import Place
from compiler_trainer.training.trainer import train

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def text(store, tmp_path_factory):
    """Return a folder of text in the store."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(3):
        (folder / f"{number}.txt").write_text(f"The fjord number {number} is a long, narrow inlet of the sea. " * 40)
    return store.put(folder, "text")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Shorten the retry times."""
    monkeypatch.setattr(sender, "RETRY_S", 0.1)
    monkeypatch.setattr(sender, "LAST_RETRY_S", 0.1)


def job(folder, url, text, resume=None, **changes):
    data = DataConfig(name="text", files=(f"{text}/*.txt",), eval_fraction=0.3, document_separator=". ", cache=str(folder.parent / "cache"))
    return options(folder, **{"data": data, "checkpoint": CheckpointConfig(interval=2, keep=2, store=url, resume=resume), **changes})


def weights(folder):
    path = checkpoint.complete(folder / "checkpoints")[-1]
    return path.name, checkpoint.read_model(path)


def assert_same(actual, expected):
    assert actual[0] == expected[0] and actual[1].keys() == expected[1].keys()
    assert all(torch.equal(actual[1][name], value) for name, value in expected[1].items())


@pytest.fixture(scope="module")
def undisturbed(store, text, tmp_path_factory):
    """Return the final state of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    train(job(folder, None, text))
    return weights(folder), timeless(metrics(folder))


DIES = """
import os, signal, time
from pathlib import Path
from test_store import Place, job, sender, train
put, offer = Place.put, sender.Sender.offer

def dies(place, file, name):
    if name == "step_00000004/index.json":
        os.kill(os.getpid(), signal.SIGKILL)
    put(place, file, name)

def in_turn(self, step):
    offer(self, step)
    while self.waiting:
        time.sleep(0.01)

Place.put, sender.Sender.offer = dies, in_turn
train(job(Path({folder!r}), {url!r}, {text!r}))
"""


@pytest.mark.full
def test_killed_during_a_copy_and_resumed_on_another_machine_it_ends_with_the_same_bits(tmp_path, store, text, undisturbed):
    url = "s3://bucket/runs/killed"
    (tmp_path / "first").mkdir()
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT), *sys.path])}
    script = DIES.format(folder=str(tmp_path / "first/run"), url=url, text=text)
    ended = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    assert RemoteCheckpoints(url).steps() == [2] and "runs/killed/step_00000004/rank_00000.safetensors" in store.names()
    shutil.rmtree(tmp_path / "first")  # the machine is gone
    folder = tmp_path / "second/run"
    train(job(folder, url, text, "auto"))
    assert_same(weights(folder), undisturbed[0])
    assert timeless(metrics(folder)) == [record for record in undisturbed[1] if record["step"] > 2]
    assert RemoteCheckpoints(url).steps() == [4, 6]


def test_an_outage_in_the_middle_is_named_training_goes_on_and_nothing_is_lost(tmp_path, store, text, undisturbed, monkeypatch, capsys):
    url, put = "s3://bucket/runs/outage", Place.put

    def goes_away(place, file, name):
        if name.startswith("step_00000002/"):
            store.stop()
            monkeypatch.setattr(Place, "put", put)
        put(place, file, name)

    def comes_back(text, *rest):
        if "tried again" in text:
            store.start()
        print(text)

    monkeypatch.setattr(Place, "put", goes_away)
    monkeypatch.setattr("compiler_trainer.training.checkpoints.say", comes_back)
    train(job(tmp_path / "run", url, text))
    output = capsys.readouterr().out
    assert re.search(rf"{url}/\S+: cannot be reached: .*; training continues, and this is tried again every 0.1 s\n", output)
    assert f"{url} answers again, and has all checkpoints" in output
    assert_same(weights(tmp_path / "run"), undisturbed[0])
    assert RemoteCheckpoints(url).steps() == [4, 6]


def test_what_an_outage_until_the_end_left_behind_is_copied_by_resume(tmp_path, store, text, undisturbed):
    url, folder = "s3://bucket/runs/away", tmp_path / "run"
    put, Place.put = Place.put, lambda place, file, name: store.stop() or put(place, file, name)
    try:
        with pytest.raises(SaveError, match="cannot be reached: .* alone has .*step_00000006; compiler-trainer resume copies these"):
            train(job(folder, url, text))
    finally:
        Place.put = put
        store.start()
    assert_same(weights(folder), undisturbed[0])
    assert RemoteCheckpoints(url).steps() == []
    assert call("resume", folder) == 0  # the run already has all its steps
    assert RemoteCheckpoints(url).steps() == [4, 6]


def test_a_store_that_does_not_answer_at_the_start_trains_nothing(tmp_path, store, text):
    cfg = job(tmp_path / "run", "s3://bucket/runs/start", text, "auto", data=DataConfig(name="synthetic", documents=40))
    store.stop()
    try:
        with pytest.raises(UserError, match="s3://bucket/runs/start: cannot be reached"):
            train(cfg)
    finally:
        store.start()
    assert not (tmp_path / "run").exists()


def test_the_checkpoints_of_two_runs_are_not_mixed(tmp_path, store, text):
    url = "s3://bucket/runs/mixed"
    train(job(tmp_path / "a", url, text, steps=4))
    with pytest.raises(UserError, match=f"^checkpoint.store: {url} has checkpoints up to step 4; resume from it with checkpoint.resume=auto"):
        train(job(tmp_path / "b", url, text))
    assert not (tmp_path / "b").exists()
    train(job(tmp_path / "b", None, text, steps=4, optim=replace(options("x").optim, lr=5e-2)))
    with pytest.raises(UserError, match=f"^checkpoint.store: {url} has another run's step_00000004 than {tmp_path}/b"):
        train(job(tmp_path / "b", url, text, "latest"))


@pytest.mark.full
def test_a_checkpoint_of_the_store_is_named_and_a_model_is_exported_there(tmp_path, store, text, undisturbed, capsys):
    url = "s3://bucket/runs/named"
    train(job(tmp_path / "a", url, text))
    train(job(tmp_path / "b", None, text, f"{url}/step_00000004"))
    assert_same(weights(tmp_path / "b"), undisturbed[0])
    assert call("export", tmp_path / "a", "s3://bucket/exported") == 0
    assert "s3://bucket/exported: 5 files; once they are on a disk, load it with transformers" in capsys.readouterr().out
    assert {name.rpartition("/")[2] for name in store.names("exported")} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert call("export", tmp_path / "a", "s3://bucket/exported") == 2
    assert call("export", tmp_path / "a", "s3://bucket/files/a.gguf", "--no-check") == 0
    assert call("export", tmp_path / "a", "s3://bucket/files/a.gguf") == 2
    assert Place("s3://bucket/files").files().keys() == {"a.gguf"}
    assert "s3://bucket/exported: exists already" in capsys.readouterr().err
    assert call("export", tmp_path / "a", tmp_path / "out", "--checkpoint", f"{url}/step_00000006") == 0
    assert call("export", tmp_path / "a", tmp_path / "none", "--checkpoint", f"{url}/step_00000007") == 2
    assert f"error: {url}/step_00000007: is not there, or is empty" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value", "message"), [
    ("checkpoint", {"dir": "s3://bucket/a"}, "checkpoint.dir: s3://bucket/a is in a store; .*checkpoint.store=s3://bucket/a"),
    ("checkpoint", {"store": "runs/a"}, "checkpoint.store: runs/a is not a URL"),
    ("run", {"dir": "s3://bucket/a"}, "run.dir: s3://bucket/a is in a store; name a folder on this machine"),
])
def test_what_does_not_go_there_is_refused(option, value, message, tmp_path):
    cfg = options(tmp_path / "run")
    with pytest.raises(UserError, match=f"^{message}"):
        train(replace(cfg, **{option: replace(getattr(cfg, option), **value)}))
