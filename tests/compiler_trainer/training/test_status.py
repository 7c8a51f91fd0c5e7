"""An engine sees what a run does: in a file, on a page, and by messages of Kubeflow's form."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from short_runs import FakeStep, options

from compiler_trainer.config.errors import UserError
from compiler_trainer.config.schema import RunConfig
from compiler_trainer.training import status as module
from compiler_trainer.training import trainer
from compiler_trainer.training.callbacks import Callback
from compiler_trainer.training.status import Status


@pytest.fixture
def fake(monkeypatch):
    """Replace compilation by a fake step."""
    monkeypatch.setattr(trainer, "compile_step", FakeStep)


class Server:
    """A server on the loopback that keeps what it is sent."""

    def __init__(self):
        self.messages = messages = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                messages.append((self.headers["Authorization"], json.loads(body)["trainerStatus"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format, *args):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server():
    opened = Server()
    yield opened
    opened.server.shutdown()
    opened.server.server_close()


def read(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_run_is_seen_while_it_compiles_and_trains(tmp_path, monkeypatch, server):
    port = server.port
    server.server.shutdown()
    server.server.server_close()  # a port that was free a moment ago
    seen = []

    def compiled(*args, **kwargs):
        seen.append(read(port, "/healthz"))
        return FakeStep(*args)

    class Look(Callback):
        def on_checkpoint(self, run, path):
            seen.append((read(port, "/healthz"), read(port, "/metrics"), read(port, "/")))

    monkeypatch.setattr(trainer, "compile_step", compiled)
    trainer.train(options(tmp_path / "run", run=RunConfig(str(tmp_path / "run"), status_port=port)), callbacks=[Look()])
    code, page = seen[0]
    assert json.loads(page) == {"phase": "compiling", "step": 0, "steps": 6} and code == 200
    (code, page), (_, numbers), (missing, _) = seen[-1]
    state = json.loads(page)
    assert (code, state["phase"], state["step"]) == (200, "training", 6) and state["loss"] > 0 and missing == 404
    assert f"# TYPE compiler_trainer_loss gauge\ncompiler_trainer_loss {state['loss']}\n" in numbers
    assert json.loads((tmp_path / "run/status.json").read_text())["phase"] == "ended"
    with pytest.raises(urllib.error.URLError):
        read(port, "/healthz")


def test_numbers_are_those_of_the_last_step_and_the_last_evaluation(tmp_path):
    status = Status(options(tmp_path / "run"))
    status.log({"step": 1, "loss": 2.0, "skipped": 1.0, "eval_loss": 3.0})
    status.log({"step": 2, "loss": 1.0})
    assert status.state == {"phase": "preparing", "steps": 6, "step": 2, "loss": 1.0, "eval_loss": 3.0}
    status.log({"step": 3})
    assert "loss" not in status.state and status.state["phase"] == "preparing"


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch):
    status = Status(options(tmp_path / "run"))  # whose folder is not there
    status.start(options(tmp_path / "run"), 0)
    status.log({"step": 1, "loss": 2.0})
    assert status.state["loss"] == 2.0 and not (tmp_path / "run").exists()


def test_a_run_that_takes_no_steps_any_more_is_not_well(tmp_path, monkeypatch):
    cfg = options(tmp_path, run=RunConfig(str(tmp_path), timeout_s=5.0))
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    status = Status(cfg)
    status.begin("compiling")
    now[0] += 1000
    assert status.is_well()
    status.start(cfg, 2)
    now[0] += 4
    status.log({"step": 3.0, "loss": 1.0})
    assert status.left_s() == 12  # three steps of four seconds
    now[0] += 4
    assert status.is_well()
    now[0] += 2
    assert not status.is_well()


def test_a_run_that_fails_says_so(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeStep, "launch", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train(options(tmp_path / "run"))
    assert json.loads((tmp_path / "run/status.json").read_text())["phase"] == "failed"


def test_a_port_in_use_is_refused(fake, tmp_path, server):
    cfg = options(tmp_path / "run")
    with pytest.raises(UserError, match=f"^run.status_port: 127.0.0.1:{server.port} cannot be served: Address already in use; choose"):
        trainer.train(replace(cfg, run=replace(cfg.run, status_port=server.port)))
    assert not Path(cfg.run.dir).exists() or not list(Path(cfg.run.dir).glob("*.y*ml"))


def test_kubeflow_is_told_the_progress(fake, tmp_path, monkeypatch, server):
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv(module.SERVER, f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv(module.TOKEN, str(tmp_path / "token"))
    monkeypatch.setattr(module, "POST_EVERY_S", 0.0)
    trainer.train(options(tmp_path / "run"))
    assert {token for token, _ in server.messages} == {"Bearer secret"}
    shares = [message["progressPercentage"] for _, message in server.messages]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 100
    last = server.messages[-1][1]
    assert last["estimatedRemainingSeconds"] == 0 and {"name": "step", "value": "6"} in last["metrics"]


def test_kubeflow_that_does_not_answer_changes_nothing(fake, tmp_path, monkeypatch):
    monkeypatch.setenv(module.SERVER, "http://127.0.0.1:9/nowhere")
    trainer.train(options(tmp_path / "a"))
    monkeypatch.setenv(module.TOKEN, str(tmp_path / "none"))
    trainer.train(options(tmp_path / "b"))
