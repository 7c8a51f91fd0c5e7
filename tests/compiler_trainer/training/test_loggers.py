"""Loggers get each step's record once; records are read back from services; an outage loses nothing."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace

import pytest
from short_runs import FakeStep, metrics, options, resuming

from compiler_trainer.config.errors import RunError, UserError
from compiler_trainer.training import loggers, steps, trainer
from compiler_trainer.training.loggers import RetryingLogger, metric_name, run_id


@pytest.fixture
def fake(monkeypatch):
    """Train around `FakeStep`."""
    monkeypatch.setattr(trainer, "compile_step", FakeStep)


class Lines:
    """A logger that writes lines of text, and at the end whether the run failed."""

    def __init__(self, path):
        self.path = path

    def start(self, cfg, done):
        self.file = open(self.path, "a")
        print(f"after {done} of {cfg.train.steps}", file=self.file)

    def log(self, record):
        print(record["step"], record["loss"], file=self.file)

    def close(self, failed):
        print("failed" if failed else "done", file=self.file)
        self.file.close()


class Away:
    """A logger whose service fails for some calls."""

    def __init__(self, calls=0, lost=()):
        self.calls, self.taken = calls, []

    def start(self, cfg, done):
        raise ConnectionError("no route to host")

    def log(self, record):
        self.calls -= 1
        if self.calls >= 0:
            raise ConnectionError("no route to host")
        self.taken.append(record["step"])

    def close(self, failed):
        pass


def logging_to(cfg, **own):
    return replace(cfg, run=replace(cfg.run, loggers=(own,)))


def test_a_logger_of_ones_own_gets_what_metrics_has(fake, tmp_path):
    cfg = logging_to(options(tmp_path / "run"), _target_="test_loggers.Lines", path=str(tmp_path / "lines"))
    trainer.train(cfg)
    lines = [f"{each['step']} {each['loss']}" for each in metrics(tmp_path / "run")]
    assert (tmp_path / "lines").read_text().splitlines() == ["after 0 of 6", *lines, "done"]
    trainer.train(resuming(replace(cfg, train=replace(cfg.train, steps=8)), "latest"))
    further = [f"{each['step']} {each['loss']}" for each in metrics(tmp_path / "run")[6:]]
    assert (tmp_path / "lines").read_text().splitlines()[8:] == ["after 6 of 8", *further, "done"]


def test_it_is_told_that_a_run_failed(fake, tmp_path, monkeypatch):
    cfg = logging_to(options(tmp_path / "run"), _target_="test_loggers.Lines", path=str(tmp_path / "lines"))
    monkeypatch.setattr(steps, "means", lambda step, batches: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train(cfg)
    assert (tmp_path / "lines").read_text().splitlines()[-1] == "failed"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"_target_": "collections.Counter"}, r"^run.loggers\[0\]: collections.Counter returns an object without `start`"),
        ({"_target_": "no_package.Logger"}, r"^run.loggers\[0\]._target_: ModuleNotFoundError: .*PYTHONPATH"),
    ],
)
def test_what_is_no_logger_is_refused_before_anything_is_written(own, message, fake, tmp_path):
    with pytest.raises(UserError, match=message):
        trainer.train(logging_to(options(tmp_path / "run"), **own))
    assert not (tmp_path / "run").exists()


def test_one_that_cannot_start_is_named(fake, tmp_path):
    with pytest.raises(RunError, match="^run.loggers: Away cannot start: ConnectionError: no route to host; fix it"):
        trainer.train(logging_to(options(tmp_path / "run"), _target_="test_loggers.Away"))


@pytest.mark.parametrize("name", ["WandB", "MLflow"])
def test_a_package_that_is_missing_is_named_with_its_install(name, fake, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name.lower(), None)
    cfg = logging_to(options(tmp_path / "run"), _target_=f"compiler_trainer.{name}")
    with pytest.raises(UserError, match=f"^run.loggers: {name.lower()} is not installed; pip install {name.lower()}"):
        trainer.train(cfg)
    assert not (tmp_path / "run").exists()


# Outages


def test_what_a_service_does_not_take_is_kept_said_once_and_handed_on(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(loggers.time, "monotonic", lambda: now[0])
    logger = RetryingLogger(away := Away(2))
    for step in range(1, 6):
        logger.log({"step": step})
        now[0] += 20  # every second call retries
    assert away.taken == [1, 2, 3, 4, 5]
    output = capsys.readouterr().out
    assert output.count("Away does not accept metrics (ConnectionError: no route to host): they are kept and sent again later") == 1
    assert output.count("Away accepts metrics again, none is missing") == 1


def test_a_record_that_a_logger_cannot_take_does_not_keep_back_later_ones(capsys):
    class Losses:
        def __init__(self):
            self.seen = []

        def log(self, record):
            self.seen.append(record["loss"])

    logger = RetryingLogger(losses := Losses())
    for record in ({"step": 1, "loss": 3.0}, {"step": 2, "skipped": 1.0}, {"step": 3, "loss": 2.0}):
        logger.log(record)
    assert losses.seen == [3.0, 2.0]
    assert capsys.readouterr().out == "Losses cannot take the metrics of step 2 (KeyError: 'loss')\n"


def test_what_it_never_took_is_said_to_be_missing(capsys):
    logger = RetryingLogger(Away(100))
    for step in (1, 2, 3):
        logger.log({"step": step})
    logger.close(False)
    assert "Away lacks the last 3 steps: ConnectionError: no route to host" in capsys.readouterr().out


# Services, read back


def logged(content, block=32768):
    """Yield the records of a file in LevelDB's log format: pieces of checksum, size and kind after a 7-byte header."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:  # the rest of a block is padding
            at += block - at % block
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a full piece, or the last
            yield whole
            whole = b""


def wandb_rows(folder):
    """Return the rows and ids of all offline runs of Weights & Biases below a folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, names = [], set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime):
        for data in logged(path.read_bytes()):
            (record := Record()).ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
            elif record.WhichOneof("record_type") == "run":
                names.add(record.run.run_id)
    return rows, names


def test_weights_and_biases_offline_is_read_back(fake, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    cfg = logging_to(options(tmp_path / "run"), _target_="compiler_trainer.WandB", project="mine", mode="offline")
    trainer.train(cfg)
    deadline = time.monotonic() + 20
    while len((result := wandb_rows(tmp_path / "run"))[0]) < 6 and time.monotonic() < deadline:
        time.sleep(0.1)  # another process writes
    rows, names = result
    result = [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]
    assert result == metrics(tmp_path / "run") and len(result) == 6
    assert names == {(tmp_path / "run/wandb.id").read_text().strip()}


def of_mlflow(uri, experiment):
    """Return parameters, status and values by metric of an experiment's only run."""
    client = pytest.importorskip("mlflow").MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    values = {name: [(each.step, each.value) for each in sorted(of, key=lambda m: m.step)] for name, of in history.items()}
    return run.data.params, run.info.status, values


def read_back(uri, tmp_path):
    cfg = options(tmp_path / "run", steps=4)
    cfg = logging_to(cfg, _target_="compiler_trainer.MLflow", tracking_uri=uri, experiment="mine")
    trainer.train(cfg)
    trainer.train(resuming(replace(cfg, train=replace(cfg.train, steps=6)), "latest"))
    params, status, values = of_mlflow(uri, "mine")
    records = metrics(tmp_path / "run")
    assert (params["model.dim"], params["optim.name"], status) == ("16", "adamw", "FINISHED")
    for name in {name for record in records for name in record} - {"step"}:
        assert values[name] == [(each["step"], pytest.approx(each[name])) for each in records if name in each], name


def test_mlflow_is_read_back(fake, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    read_back((tmp_path / "mlflow").as_uri(), tmp_path)


@pytest.mark.full
def test_a_server_of_mlflow_is_read_back_and_may_be_away(fake, tmp_path, monkeypatch, capsys):
    pytest.importorskip("mlflow")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--host", "127.0.0.1", "--port", str(port)]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen([sys.executable, "-m", "mlflow", "server", "--workers", "1", *where], env=os.environ | quiet,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        uri = f"http://127.0.0.1:{port}"
        assert any(is_up(f"{uri}/health") for _ in range(120))
        read_back(uri, tmp_path)
    finally:
        os.killpg(server.pid, 15)
        server.wait()
    second = loggers.MLflow(uri)
    second.client, second.id = second.mlflow.MlflowClient(tracking_uri=uri), "0" * 32
    retrying = RetryingLogger(second)
    retrying.log({"step": 1, "loss": 2.0})
    assert "MLflow does not accept metrics" in capsys.readouterr().out and len(retrying.pending) == 1


def is_up(url):
    time.sleep(0.5)
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


def test_a_run_that_goes_on_is_known_as_before_and_one_that_begins_anew_is_not(tmp_path):
    names = iter("abc")
    known = [run_id(tmp_path / "id", done, lambda: next(names)) for done in (0, 2, 4, 0, 3)]
    assert known == ["a", "a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("eval_loss", "eval_loss"),
        ("eval_loss/books", "eval_loss/books"),
        ("eval_loss//data/a, b*.txt", "eval_loss/data/a_ b_.txt"),
        ("eval_loss/../up", "eval_loss/_/up"),
    ],
)
def test_names_of_metrics_are_made_such_as_mlflow_takes(name, taken):
    assert metric_name(name) == taken
    validation = pytest.importorskip("mlflow.utils.validation")
    validation._validate_metric_name(taken)
