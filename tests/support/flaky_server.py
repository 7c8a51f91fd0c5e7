"""A server of files over http that sends ranges, and now and then an error, nothing, or a part of the answer."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Flaky:
    """The files of a folder; of `every` requests, one fails, in one of three ways; with `is_down`, all fail."""

    def __init__(self, folder: Path, every: int):
        self.folder, self.every, self.is_down = folder, every, False
        self.requests = self.failures = self.sent_bytes = 0
        self.lock = threading.Lock()

    def failure(self) -> int | None:
        """Return the kind of failure of the next request, or None."""
        with self.lock:
            self.requests += 1
            if not self.is_down and self.requests % self.every:
                return None
            self.failures += 1
            return self.failures % 3


@contextmanager
def flaky(folder: Path, every: int) -> Iterator[tuple[str, Flaky]]:
    """Yield the url of a folder, and its server."""
    state = Flaky(folder, every)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, has_body: bool) -> None:
            kind = state.failure()
            path = state.folder / self.path.lstrip("/")
            if kind == 0:
                self.close_connection = True
                return
            if kind == 1 or not path.is_file():
                self.send_response(503 if kind == 1 else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = path.read_bytes()
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, end = (int(span[1]), min(int(span[2]) + 1, len(content))) if span else (0, len(content))
            self.send_response(206 if span else 200)
            self.send_header("Content-Length", str(end - start))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{len(content)}"')
            if span:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
            self.end_headers()
            if has_body:
                part = content[start:end]
                self.wfile.write(part[: len(part) // 2] if kind == 2 else part)
                state.sent_bytes += len(part)
                self.close_connection = kind == 2

        def do_GET(self) -> None:
            self.answer(True)

        def do_HEAD(self) -> None:
            self.answer(False)

        def log_message(self, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", state
        server.shutdown()
