"""The state of a run, for an engine that watches it: a file, a page, and Kubeflow's progress. Rank 0 publishes them.

http://HOST:PORT/healthz tells a run that prepares or compiles from one that trains, and from its first step on
`status.json` in the run folder does:

    {"phase": "training", "step": 120, "steps": 1000, "loss": 2.31, "tokens_per_s": 81234.5, ...}

/healthz answers 503 if the run trains and has finished no step for `run.timeout_s`. /metrics has the numbers of the
last step for Prometheus. Kubeflow Trainer gets them by POST where it asks for it (KUBEFLOW_TRAINER_SERVER_URL); a
server that does not answer changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
import threading
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import write_atomically
from compiler_trainer.config.schema import Config
from compiler_trainer.elastic.member import address, is_member
from compiler_trainer.step.ranks import rank
from compiler_trainer.training.metrics import Record

FILE, LAUNCHER = "status.json", "launcher"
WRITE_EVERY_S, POST_EVERY_S, PATIENCE_S = 1.0, 5.0, 5.0
SERVER, CERTIFICATE, TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))


class Status:
    """A context manager and logger that publishes the state of a run; on other ranks than 0 it does nothing."""

    def __init__(self, cfg: Config):
        self.cfg, self.is_on = cfg, rank() == 0
        self.state: dict[str, Any] = {"phase": "preparing", "step": 0, "steps": cfg.train.steps}
        if is_member():
            self.state[LAUNCHER] = address()
        self.numbers: Record = {}  # of the last step, and of the last evaluation
        self.changed = self.written = self.posted = 0.0
        self.began, self.done, self.trains = time.monotonic(), 0, False
        self.page: ThreadingHTTPServer | None = None
        self.poster = ThreadPoolExecutor(1, "kubeflow")
        self.post: Future[None] | None = None

    def __enter__(self) -> Status:
        if self.is_on:
            if self.cfg.run.status_port is not None:
                self.page = open_page(self, self.cfg.run.status_host, self.cfg.run.status_port)
            self.begin("preparing")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.is_on:
            self.begin("failed" if kind is not None else "ended")
        if self.page is not None:
            self.page.shutdown()
            self.page.server_close()
        self.poster.shutdown()

    def start(self, cfg: Config, done: int) -> None:
        """Begin training after `done` steps."""
        self.began, self.done = time.monotonic(), done
        self.state, self.trains = self.state | {"step": done}, True
        self.begin("training")

    def begin(self, phase: str) -> None:
        """Publish that a phase begins."""
        self.state = self.state | {"phase": phase}  # a new dict, because the page reads it from another thread
        self.publish(is_phase=True)

    def log(self, record: Record) -> None:
        """Publish the numbers of a step."""
        phase = {name: value for name, value in self.state.items() if name not in self.numbers}
        evaluation = {name: value for name, value in self.numbers.items() if name.startswith("eval_")}
        self.numbers = {name: value for name, value in {**evaluation, **record}.items() if name != "step"}
        self.state = phase | {"step": int(record["step"])} | self.numbers
        self.publish()

    def close(self, failed: bool) -> None:
        """Do nothing: the run has not ended yet."""

    def is_well(self) -> bool:
        """Return False if the run trains and takes no steps any more."""
        waited_s = time.monotonic() - self.changed
        return self.state["phase"] != "training" or waited_s < self.cfg.run.timeout_s

    def publish(self, is_phase: bool = False) -> None:
        """Write the file and send the progress, at most once in a while unless a phase begins."""
        self.changed = now = time.monotonic()
        if self.trains and (is_phase or now - self.written >= WRITE_EVERY_S):
            self.written = now
            with contextlib.suppress(UserError):  # a full disk is reported by the checkpoint
                write_atomically(Path(self.cfg.run.dir, FILE), json.dumps(self.state) + "\n")
        is_free = self.post is None or self.post.done() and now - self.posted >= POST_EVERY_S
        if SERVER in os.environ and (is_phase or is_free):
            self.posted = now
            self.post = self.poster.submit(send, progress(self.state, self.left_s()))

    def left_s(self) -> int | None:
        """Return the seconds until the last step, at the pace so far."""
        taken, left = self.state["step"] - self.done, self.state["steps"] - self.state["step"]
        return round((time.monotonic() - self.began) / taken * left) if taken > 0 else None


# ---- Prometheus ----------------------------------------------------------------------------------------


def open_page(status: Status, host: str, port: int) -> ThreadingHTTPServer:
    """Serve the pages in a thread; raise UserError if the port is in use."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in ("/healthz", "/metrics"):
                return self.send_error(404)
            is_health = self.path == "/healthz"
            text = json.dumps(status.state) + "\n" if is_health else metrics(status.state)
            self.send_response(200 if not is_health or status.is_well() else 503)
            self.send_header("Content-Type", "application/json" if is_health else "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    try:
        server = ThreadingHTTPServer((host, port), Page)
    except OSError as error:
        problem = f"{host}:{port} cannot be served: {error.strerror}"
        raise UserError("run.status_port", f"{problem}; choose another") from error
    threading.Thread(target=server.serve_forever, daemon=True, name="status").start()
    return server


def metrics(state: dict[str, Any]) -> str:
    """Return the numbers of a state as Prometheus reads them."""
    numbers = {re.sub(r"\W", "_", name): value for name, value in state.items() if isinstance(value, int | float)}
    lines = (f"# TYPE compiler_trainer_{n} gauge\ncompiler_trainer_{n} {value}\n" for n, value in numbers.items())
    return "".join(lines)


# ---- Kubeflow ------------------------------------------------------------------------------------------


def progress(state: dict[str, Any], left_s: int | None) -> bytes:
    """Return Kubeflow Trainer's message on a state."""
    numbers = [{"name": n, "value": str(v)} for n, v in state.items() if isinstance(v, int | float)]
    left = {} if left_s is None else {"estimatedRemainingSeconds": left_s}
    done, now = 100 * state["step"] // state["steps"], datetime.now(UTC).isoformat()
    status = {"lastUpdatedTime": now, "progressPercentage": done, **left, "metrics": numbers}
    return json.dumps({"trainerStatus": status}).encode()


def send(message: bytes) -> None:
    """Send a message to Kubeflow Trainer; without an answer, do nothing."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        headers = {"Authorization": f"Bearer {Path(os.environ[TOKEN]).read_text().strip()}"}
        request = urllib.request.Request(os.environ[SERVER], message, headers | {"Content-Type": "application/json"})
        certificate = os.environ.get(CERTIFICATE)
        trust = ssl.create_default_context(cafile=certificate) if certificate else None
        urllib.request.urlopen(request, timeout=PATIENCE_S, context=trust).close()
