"""Ranks of one attempt of a job meet in a store that still holds the keys of earlier attempts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from compiler_trainer.step import meeting


def attempt(store: dist.Store, names: str, delays: list[float]) -> list[str]:
    """Return the name of the attempt that each rank finds; ranks arrive with delays."""
    result = [""] * len(delays)

    def come(rank):
        threading.Event().wait(delays[rank])
        if rank == 0:
            result[0] = meeting.give(store, names, len(delays))
        else:
            result[rank] = meeting.take(store, f"{names}{rank:02}", rank)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(len(delays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return result


@pytest.mark.parametrize("delays", [[0.0, 0.0, 0.0], [0.2, 0.0, 0.0], [0.0, 0.3, 0.1]], ids=str)
def test_each_attempt_has_a_name_that_all_know(delays):
    store = dist.HashStore()
    assert attempt(store, "first", delays) == ["first"] * 3
    assert attempt(store, "later", delays) == ["later"] * 3


def test_an_attempt_that_broke_off_leaves_nothing_behind():
    store = dist.HashStore()
    store.set("number1", "gone")
    store.set("name1", "gonefirst")
    store.set("has2", "first")
    assert attempt(store, "later", [0.0, 0.2, 0.1]) == ["later"] * 3


def test_ranks_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", timedelta(seconds=0.1))
    with pytest.raises(meeting.NoMeeting, match=r"ranks \[1, 2\] of 3 did not come"):
        meeting.give(dist.HashStore(), "first", 3)
    with pytest.raises(meeting.NoMeeting, match="rank 0 did not come"):
        meeting.take(dist.HashStore(), "number", 1)


def test_a_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "compiler_trainer", "mesh.dp_shard=2"]
        done = subprocess.run(command, env=os.environ | job, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"error: MASTER_PORT: {port} is in use on the machine of rank 0; choose another port\n")


def test_a_store_out_of_reach_is_one_line(monkeypatch):
    for name, value in {"RANK": "3", "MASTER_ADDR": "node7", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)

    def rendezvous(method):
        raise dist.DistNetworkError("the client socket timed out\nmore of it")

    monkeypatch.setattr(dist, "rendezvous", rendezvous)
    message = r"^rank 3 cannot reach the store of the job at node7:29500 \(the client socket timed out\); rank 0 must be running"
    with pytest.raises(meeting.NoMeeting, match=message):
        meeting.meeting.__wrapped__()
