"""A rank that leaves closes its connections, so that ranks that wait for it fail, although PyTorch holds a collective."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from compiler_trainer.step.connections import close_connections, noting_connections

ROOT = Path(__file__).parents[3]
RANK = """
import os, sys, torch, torch.distributed as dist
from compiler_trainer.step import ranks
from compiler_trainer.step.connections import close_connections, connections
ranks.start_ranks()
group = ranks.new_group()
dist.barrier()  # both are connected
if ranks.rank() == 0:
    held = dist.all_reduce(torch.ones(1), async_op=True)  # as a program that fails before it waits for it
    close_connections()
    sys.stdin.read()
    os._exit(0)
try:
    dist.all_reduce(torch.ones(1), group=group)  # waits for rank 0, which waits in another group
except RuntimeError as error:
    print("failed:", error, flush=True)
"""


def test_only_sockets_that_were_opened_in_the_block_are_closed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as other, server.accept()[0] as far_other:
            with noting_connections():
                mine = socket.create_connection(server.getsockname())
                listening = socket.create_server(("127.0.0.1", 0))
            far_mine = server.accept()[0]
            close_connections()
            assert far_mine.recv(1) == b""  # it is over
            far_other.sendall(b"x")
            assert other.recv(1) == b"x"
            with socket.create_connection(listening.getsockname()):
                listening.accept()[0].close()
            for each in (mine, listening, far_mine):
                each.close()


def test_a_rank_that_waits_for_one_that_has_closed_its_connections_fails():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen([sys.executable, "-c", RANK], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         env=env | {"RANK": str(number), "LOCAL_RANK": str(number)})
        for number in range(2)
    ]
    try:
        assert "failed:" in started[1].communicate(timeout=60)[0]
    finally:
        for each in started:
            each.kill()
            each.communicate()
