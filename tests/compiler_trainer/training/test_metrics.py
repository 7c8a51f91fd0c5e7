"""Metrics are on disk when a step ends, each step once; peak memory is measured; the console works anywhere."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys

import pytest
import torch
from short_runs import no_file_above
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compiler_trainer.config.schema import Config, RunConfig
from compiler_trainer.training import loggers, metrics
from compiler_trainer.training.evaluate import means
from compiler_trainer.training.loggers import Progress, Working, build_loggers, logging, say_contents
from compiler_trainer.training.metrics import FILE, read
from compiler_trainer.training.speed import PeakMemory, cpu_peak

CPU = torch.device("cpu")
MEGABYTE = 250_000  # fp32 elements


def record(step, **values):
    return {"step": step, "loss": 5.0 / step, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_s": 1234.5, **values}


def started(folder, after=0):
    """Return the built-in loggers of a run, started."""
    cfg = Config(run=RunConfig(dir=str(folder)))
    return logging(cfg, after, build_loggers(cfg))


def write(folder, steps, after=0):
    with started(folder, after) as log:
        for step in steps:
            log(record(step))


def scalars(folder, name):
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


# Files


def test_a_line_and_an_event_a_step(tmp_path):
    with started(tmp_path) as log:
        for step in (1, 2):
            log(record(step, eval_loss=3.5))
            lines = (tmp_path / FILE).read_text().splitlines()
            assert [json.loads(line) for line in lines] == [record(s, eval_loss=3.5) for s in range(1, step + 1)]
            assert scalars(tmp_path, "loss") == [(s, pytest.approx(5.0 / s)) for s in range(1, step + 1)]
    assert scalars(tmp_path, "eval_loss") == [(1, 3.5), (2, 3.5)]


def test_a_resumed_run_has_each_step_once(tmp_path):
    write(tmp_path, [1, 2, 3, 4])
    with open(tmp_path / FILE, "a") as file:
        file.write('{"step": 5, "lo')  # cut short by a kill
    write(tmp_path, [3, 4, 5], after=2)
    assert read(tmp_path / FILE) == [record(step) for step in (1, 2, 3, 4, 5)]
    assert scalars(tmp_path, "loss") == [(step, pytest.approx(5.0 / step)) for step in (1, 2, 3, 4, 5)]


def test_nothing_but_numbers_is_written(tmp_path):
    with pytest.raises(ValueError), started(tmp_path) as log:
        log(record(1, grad_norm=float("nan")))
    assert (tmp_path / FILE).read_text() == ""


def test_a_full_disk_loses_nothing_and_stops_nothing(tmp_path, monkeypatch, capsys):
    write(tmp_path, [1, 2])
    real, room = io.FileIO, [200]

    class Full(io.FileIO):
        """Files on a disk with limited room, which the last write fills."""

        def write(self, content):
            if not room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = min(len(content), room[0])
            room[0] -= taken
            return super().write(content[:taken])

    monkeypatch.setattr(metrics, "open", lambda path, mode, buffering: Full(path, mode), raising=False)
    with started(tmp_path, 2) as log:
        for step in (3, 4, 5):
            log(record(step))
        monkeypatch.setattr(metrics, "open", lambda path, mode, buffering: real(path, mode))
        assert [r["step"] for r in read(tmp_path / FILE)] in ([1, 2], [1, 2, 3])
        log(record(6))
    assert read(tmp_path / FILE) == [record(step) for step in range(1, 7)]
    assert scalars(tmp_path, "loss") == [(step, pytest.approx(5.0 / step)) for step in range(1, 7)]
    output = capsys.readouterr().out
    assert output.count("metrics.jsonl cannot be written (No space left on device)") == 1
    assert output.count("metrics.jsonl can be written again, nothing is missing") == 1


def test_what_never_found_room_is_said_to_be_missing(tmp_path, monkeypatch, capsys):
    with started(tmp_path) as log:
        lose(log, monkeypatch)
    assert "metrics.jsonl lacks its last " in capsys.readouterr().out


def lose(log, monkeypatch):
    """Log a step while the disk refuses writes."""
    monkeypatch.setattr(metrics, "open", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")), raising=False)
    log(record(1))


# Memory


def three_at_once():
    """Allocate two megabytes, free one, allocate three: a peak of four."""
    result, dropped = torch.ones(MEGABYTE), torch.ones(MEGABYTE)
    del dropped
    more = torch.ones(3 * MEGABYTE)
    del more
    return result


def test_the_peak_is_what_was_alive_at_once():
    result, peak = cpu_peak(three_at_once)
    assert peak == 4 * 4 * MEGABYTE
    assert torch.equal(result, torch.ones(MEGABYTE))


def test_what_operators_take_inside_counts():
    x = torch.ones(500, 500)
    _, peak = cpu_peak(lambda: (x @ x + 1).sum().item())
    assert 2 * x.nbytes <= peak < 2.1 * x.nbytes


def test_state_is_added_and_one_step_profiled(capfd):
    memory = PeakMemory(CPU, [torch.ones(10), torch.ones(5, dtype=torch.bfloat16)])
    assert memory.during(three_at_once).numel() == MEGABYTE
    assert memory.bytes == 40 + 10 + 4 * 4 * MEGABYTE
    assert memory.during(lambda: "anything") == "anything"
    assert memory.bytes == 40 + 10 + 4 * 4 * MEGABYTE
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("most_bytes", [0, 100])
def test_where_a_full_disk_does_not_take_the_profile_the_next_step_is_measured(most_bytes):
    memory = PeakMemory(CPU, [torch.ones(10)])
    with no_file_above(most_bytes):
        assert memory.during(three_at_once).numel() == MEGABYTE
    assert memory.bytes == 0
    memory.during(three_at_once)
    assert memory.bytes == 40 + 4 * 4 * MEGABYTE


# Evaluation


class Given:
    """A step that gives each batch the loss written in it."""

    def measure(self, batch):
        return {"loss": float(batch["loss"])}

    def weights(self, batch):
        return {}

    def total(self, values):
        return values.sum()


def test_a_batch_weighs_as_much_as_it_has_labels():
    few = {"loss": torch.tensor(8.0), "labels": torch.tensor([[1, -100, -100, -100]])}
    many = {"loss": torch.tensor(2.0), "labels": torch.tensor([[1, 2, 3, -100]])}
    assert means(Given(), [("a", few), ("a", many)]) == ({"loss": (8.0 * 1 + 2.0 * 3) / 4}, 4)


# Console


def show_all(steps, done=0):
    with Progress(steps, done) as shown:
        for step in range(done + 1, steps + 1):
            shown.show(record(step, **({"eval_loss": 7.25} if step == steps // 2 else {})))


def test_plain_lines_without_a_terminal(capsys):
    show_all(50)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/50" for step in range(5, 51, 5)]
    assert re.fullmatch(r"step 5/50  loss 1\.000  norm 0\.5  lr 0\.001  1,234 tokens/s  0:00:00 left", lines[0])
    assert all(("eval loss 7.250" in line) == (i >= 4) for i, line in enumerate(lines))
    assert all(("eval loss 7.250 (step 25)" in line) == (i > 4) for i, line in enumerate(lines))


def test_plain_lines_of_a_short_and_of_a_resumed_run(capsys):
    show_all(3)
    assert len(capsys.readouterr().out.splitlines()) == 3
    show_all(100, done=45)
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert shown == [f"{step}/100" for step in range(50, 101, 10)]


def test_a_plain_line_when_steps_are_slow(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(loggers.time, "monotonic", lambda: now[0])
    shown = Progress(1000)
    for step, now[0] in ((1, 10.0), (2, 31.0), (3, 50.0), (4, 62.0)):
        shown.show(record(step))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["2/1000", "4/1000"]


def test_time_left_is_what_the_steps_so_far_took(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loggers.time, "monotonic", lambda: now[0])
    shown = Progress(30, done=10)
    for step in range(11, 16):
        now[0] += 2.0
        shown.show(record(step))
    assert shown.line(record(15)).endswith("0:00:30 left")


class Terminal(io.StringIO):
    """A standard output that claims to be a terminal."""

    def isatty(self):
        return True


def test_one_line_that_renews_itself_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stdout", Terminal())
    show_all(40)
    text = sys.stdout.getvalue()
    assert "step 40/40  loss 0.125" in text and "\r" in text
    assert text.count("\n") <= 2


def test_the_end_says_what_is_there(tmp_path, capsys):
    (tmp_path / "graphs").mkdir()
    (tmp_path / FILE).touch()
    (tmp_path / "events.out.tfevents.1.host").touch()
    say_contents(tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}:",
        "  metrics.jsonl          one JSON object a step",
        "  events.out.tfevents.*  the same for TensorBoard",
        "  graphs/                the graph after each pass, and the pass's report",
    ]


def test_what_is_compiled_is_said_now_and_then(capsys, monkeypatch):
    clock = iter([100.0, 100.5, 102.5, 103.0, 105.0])
    monkeypatch.setattr("compiler_trainer.training.loggers.time.monotonic", lambda: next(clock))
    with Working() as tell:
        for what in ("capture", "step: joint", "step: remat", "step: forward_0, 1 of 9 bodies"):
            tell(what)
    assert capsys.readouterr().out.splitlines() == ["  2 s: step: joint", "  5 s: step: forward_0, 1 of 9 bodies"]
