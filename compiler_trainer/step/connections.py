"""The connections of gloo groups, which this process can close so that ranks that wait for it, or it for them, fail.

A group that is destroyed keeps them open while one of its collectives is in PyTorch's registry: one that was launched
by a program that failed before it waited for it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

connections: set[str] = set()  # as `open_sockets` names them


@contextmanager
def noting_connections() -> Iterator[None]:
    """Remember the sockets that the block opens."""
    before = set(open_sockets().values())
    yield
    connections.update(set(open_sockets().values()) - before)


def close_connections() -> None:
    """Close the connections that are remembered."""
    for number, name in open_sockets().items():
        if name in connections:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo ends if it cannot listen
                    connection.shutdown(socket.SHUT_RDWR)
    connections.clear()


def open_sockets() -> dict[int, str]:
    """Return the names of this process's sockets by file descriptor; none on systems without /proc."""
    sockets = {}
    for link in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # the descriptor of the listing itself
            sockets[int(link.name)] = os.readlink(link)
    return {number: name for number, name in sockets.items() if name.startswith("socket:")}
