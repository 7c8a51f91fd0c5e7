"""Run a command on several ranks that share one GPU: `python -m tools.gpu_day.ranks 2 compiler_trainer doctor`.

NCCL refuses two ranks on one GPU of one host. Here each rank claims to be a host of its own (`NCCL_HOSTID`), so NCCL
sends through sockets of the loopback interface. Values, order and deadlocks are those of a job of several machines;
speed is not. On a CPU the ranks use gloo.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

ALONE = {
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_DEBUG": "WARN",
}


def main(arguments: Sequence[str]) -> int:
    """Start the ranks and wait for them; return the exit code of the first that fails, when all have ended."""
    size, command = int(arguments[0]), arguments[1:]
    job = ALONE | {"WORLD_SIZE": str(size), "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            env=os.environ | job | {"RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"},
        )
        for rank in range(size)
    ]
    return next((code for code in [rank.wait() for rank in ranks] if code), 0)


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
