"""An S3 server (moto) on the loopback interface, whose objects survive a restart of the server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import fsspec
import pytest
from moto.server import ThreadedMotoServer

BUCKET = "s3://bucket"


class Store:
    """A server with one bucket, and the environment variables that a client needs to reach it."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.port = 0
        self.start()
        self.env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}", "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip

    def start(self) -> None:
        self.server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self.server.start()
        _, self.port = self.server.get_host_and_port()

    def stop(self) -> None:
        self.server.stop()

    def put(self, folder: Path, name: str) -> str:
        """Copy a file or a folder to a name in the bucket; return its url."""
        files = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
        for file in files:
            below = "" if file == folder else f"/{file.relative_to(folder)}"
            fsspec.filesystem("s3").pipe_file(f"bucket/{name}{below}", file.read_bytes())
        return f"{BUCKET}/{name}"

    def names(self, below: str = "") -> set[str]:
        """Return the names in the bucket below a name."""
        fs = fsspec.filesystem("s3")
        fs.invalidate_cache()
        return {path.removeprefix("bucket/") for path in fs.find(f"bucket/{below}")}


@contextmanager
def served() -> Iterator[Store]:
    """Yield a store that this process and its children reach."""
    with pytest.MonkeyPatch.context() as patch:
        found = Store()
        for name, value in found.env.items():
            patch.setenv(name, value)
        urlopen(Request(f"{found.env['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST")).close()  # objects survive the server
        fsspec.filesystem("s3").mkdir("bucket")
        yield found
        found.stop()
        fsspec.filesystem("s3").clear_instance_cache()
