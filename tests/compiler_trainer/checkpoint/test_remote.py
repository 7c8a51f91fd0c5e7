"""Checkpoints in an object store: sent during training, complete or ignored, kept, brought back, none lost."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from stored_state import assert_same, blank, build, saved, state_at

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import Damaged, SaveError, Saver, listing, remote, sender
from compiler_trainer.config.schema import CheckpointConfig
from compiler_trainer.places.store import TRAFFIC, Place, Unreachable

numbers = itertools.count()


@pytest.fixture
def url(store, monkeypatch):
    """Return an empty folder of the store, with short retry times."""
    monkeypatch.setattr(sender, "RETRY_S", 0.05)
    monkeypatch.setattr(sender, "LAST_RETRY_S", 0.05)
    return f"s3://bucket/runs/{next(numbers)}"


def there(url):
    return remote.RemoteCheckpoints(url).steps()


def run(folder, url, steps, message=None, **options):
    """Save after some steps."""
    cfg = CheckpointConfig(store=url, **options)
    with Saver(build("two"), folder, cfg, tell=(message if message is not None else []).append) as saver:
        for number in steps:
            loss = 5.0 - number if number < 4 else 9.0
            saver.save(replace(state_at(number), eval_loss=loss))
            saver.wait()


def until(holds):
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_is_brought_is_what_was_sent(tmp_path, url):
    run(tmp_path / "a", url, [1, 2])
    checkpoint.bring_newest(url, tmp_path / "b", print)
    (path,) = checkpoint.complete(tmp_path / "b")
    sent = tmp_path / "a" / path.name
    assert path.name == "step_00000002" and {f.name: f.read_bytes() for f in path.iterdir()} == {f.name: f.read_bytes() for f in sent.iterdir()}
    checkpoint.load(result := blank("two"), checkpoint.opened(path))
    assert_same(result, build("two"))


def test_what_watches_a_run_sees_that_files_come_and_go(tmp_path, url):
    run(tmp_path / "a", url, [1])
    size = sum(file.stat().st_size for file in tmp_path.glob("a/step_*/*"))
    before = TRAFFIC.value
    checkpoint.bring_newest(url, tmp_path / "b", print)
    assert TRAFFIC.value - before == size


def test_the_index_is_written_last_and_deleted_first(tmp_path, url, monkeypatch):
    done = []
    put, remove = Place.put, Place.remove
    monkeypatch.setattr(Place, "put", lambda place, file, name: done.append(("put", name)) or put(place, file, name))
    monkeypatch.setattr(Place, "remove", lambda place, name: done.append(("remove", name)) or remove(place, name))
    path = saved(build("two"), tmp_path, 3)
    store = remote.RemoteCheckpoints(url)
    store.send(path)
    store.send(path)  # over itself
    names = [f"step_00000003/{name}" for name in ("rank_00000.safetensors", "rank_00001.safetensors", "index.json")]
    assert done == [*(("put", name) for name in names), *(("remove", name) for name in (names[2], *names[:2])), *(("put", name) for name in names)]


@pytest.mark.parametrize("lives", [1, 2])
def test_what_was_sent_in_part_is_not_there(lives, tmp_path, url, monkeypatch):
    run(tmp_path / "a", url, [1])
    put, count = Place.put, itertools.count(1)

    def dies(place, file, name):
        if next(count) > lives:
            raise Unreachable(url, "is gone")
        put(place, file, name)

    monkeypatch.setattr(Place, "put", dies)
    with pytest.raises(Unreachable):
        remote.RemoteCheckpoints(url).send(saved(build("two"), tmp_path / "other", 7))
    assert len(fsspec.filesystem("s3").find(f"{url}/step_00000007")) == lives and there(url) == [1]
    checkpoint.bring_newest(url, tmp_path / "b", print)
    assert [path.name for path in checkpoint.complete(tmp_path / "b")] == ["step_00000001"]


def test_the_store_keeps_what_the_options_say(tmp_path, url):
    run(tmp_path / "a", url, range(1, 8), keep=2, keep_every=5, keep_best=1)
    assert there(url) == [3, 5, 6, 7] and {3, 5, 6, 7} <= set(map(checkpoint.number_of, checkpoint.complete(tmp_path / "a")))
    checkpoint.bring_newest(url, tmp_path / "b", print)  # on another machine
    run(tmp_path / "b", url, [8, 9], keep=2, keep_every=5, keep_best=1)
    assert there(url) == [3, 5, 8, 9]


def test_an_outage_is_said_once_and_what_is_still_here_is_sent_after_it(tmp_path, url, store, monkeypatch):
    output = []
    monkeypatch.setattr(sender, "RETRY_S", 60.0)
    cfg = CheckpointConfig(store=url, keep=2)
    with Saver(build("two"), tmp_path, cfg, tell=output.append) as saver:
        saver.save(state_at(1))
        until(lambda: there(url) == [1])
        store.stop()
        for number in (2, 3, 4):
            saver.save(state_at(number))
            saver.wait()
            until(lambda: saver.sender.failure and saver.sender.sending is None)
        store.start()
        saver.sender.woken.set()
        until(lambda: len(output) == 3)
    assert there(url) == [3, 4]
    outage, gone, second = output
    assert re.match(f"{url}.* cannot be reached: .*; training continues, and this is tried again every 60 s", outage)
    assert gone == f"{tmp_path}/step_00000002 was deleted before it was copied to {url}"
    assert second == f"{url} answers again, and has all checkpoints"


def test_a_store_that_is_gone_in_the_end_fails_the_run_and_the_next_sends_what_lacks(tmp_path, url, store):
    run(tmp_path, url, [1])
    store.stop()
    try:
        with pytest.raises(SaveError, match=f"cannot be reached: .*; {tmp_path} alone has step_00000001, step_00000002, step_00000003; compiler-trainer resume copies these"):
            run(tmp_path, url, [2, 3], keep=3)
    finally:
        store.start()
    assert there(url) == [1] and len(checkpoint.complete(tmp_path)) == 3
    run(tmp_path, url, [4], keep=4)
    assert there(url) == [1, 2, 3, 4]


def test_what_is_being_sent_is_not_deleted_here(tmp_path, url, monkeypatch):
    put, slow, sent = Place.put, [], []

    def waits(place, file, name):
        if name.startswith("step_00000001/") and not slow:
            slow.append(1)
            until(lambda: (tmp_path / "step_00000004").is_dir())
        put(place, file, name)
        sent.append(name)

    monkeypatch.setattr(Place, "put", waits)
    output = []
    with Saver(build("two"), tmp_path, CheckpointConfig(store=url, keep=1), tell=output.append) as saver:
        saver.save(state_at(1))
        until(lambda: slow)
        for number in (2, 3, 4):
            saver.save(state_at(number))
            saver.wait()
    assert [name for name in sent if name.endswith("index.json")] == ["step_00000001/index.json", "step_00000004/index.json"]
    assert there(url) == [4] and {re.search(r"step_\d+ was deleted", line)[0] for line in output} == {"step_00000002 was deleted", "step_00000003 was deleted"}


def test_a_damaged_one_is_passed_over_and_leaves_nothing(tmp_path, url):
    run(tmp_path / "a", url, [1, 2])
    fs, name = fsspec.filesystem("s3"), f"{url}/step_00000002/rank_00001.safetensors"
    content = bytearray(fs.cat_file(name))
    content[-3] ^= 1
    fs.pipe_file(name, bytes(content))
    with pytest.raises(Damaged, match="its SHA-256 differs"):
        remote.RemoteCheckpoints(url).bring(2, tmp_path / "b")
    assert list((tmp_path / "b").iterdir()) == []
    output = []
    checkpoint.bring_newest(url, tmp_path / "b", output.append)
    assert [path.name for path in checkpoint.complete(tmp_path / "b")] == ["step_00000001"]
    assert f"{url}/step_00000002 is damaged and passed over" in output[0] and "step_00000001 was copied from" in output[1]


def test_what_a_run_left_as_bad_is_not_brought_back_and_goes(tmp_path, url):
    run(tmp_path, url, [1, 2])
    listing.set_aside(tmp_path / "step_00000002", "left")
    checkpoint.bring_newest(url, tmp_path, print)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step_00000001"]
    run(tmp_path, url, [3], keep=9)
    assert there(url) == [1, 3]


def test_what_there_is_is_not_brought_again(tmp_path, url, monkeypatch):
    run(tmp_path / "a", url, [1, 2])
    monkeypatch.setattr(Place, "get", lambda *args: pytest.fail("is here"))
    checkpoint.bring_newest(url, tmp_path / "a", print)
    checkpoint.bring_newest(f"{url}/none", tmp_path / "b", print)
    assert not Path(tmp_path / "b").exists()
