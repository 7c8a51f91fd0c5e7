"""Half an hour with a GPU: every part's options compose, and what fails or takes too long is written down."""

from __future__ import annotations

import json

import pytest

from compiler_trainer.config.compose import compose, typed
from compiler_trainer.config.device import settled
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import validate
from tools import gpu_day
from tools.bench.job import composed
from tools.gpu_day import PARTS, Part, main


@pytest.mark.parametrize("part", [part for part in PARTS if part.job], ids=lambda part: part.name)
def test_options_of_jobs_compose(part):
    cfg = typed(compose(part.options("cuda")))
    assert cfg.train.seq_len >= 4096
    if part.small is not None:
        assert composed(part.options("cpu"), 1).model.dim == 128


@pytest.mark.parametrize("part", [part for part in PARTS if part.is_for("none")], ids=lambda part: part.name)
def test_jobs_of_a_gpu_that_is_not_there_compose(part, tmp_path):
    """And those that a dry run refuses are not predicted."""
    found = [command for _, command in gpu_day.commands(part, "none", tmp_path)]
    for _, *command in found:
        given = compose([word for word in command if "=" in word])
        predicted = build(Config, given)
        validate(settled(predicted, on_gpu=True), 1)
        assert predicted.cluster.name == "h100"
    assert part.within or len(found) == 1 + ("offloading" not in part.name)


@pytest.mark.full
def test_a_job_is_made_and_predicted_without_a_gpu(tmp_path, capsys):
    assert main(["--out", str(tmp_path), "--device", "none", "--only", "dense, recorded*"]) == 0
    said = (tmp_path / gpu_day.REPORT).read_text()
    assert "made: " in said and "for 1 ranks on NVIDIA H100" in said and "## measured beside predicted" in said


def bench_leaves(out, part, found):
    folder = out / "bench" / part.folder
    folder.mkdir(parents=True)
    (folder / "bench.json").write_text(json.dumps(found))


def test_the_table_has_what_was_measured_beside_what_was_predicted(tmp_path):
    part, rounds = PARTS[2], [{"tokens_per_s": speed, "peak_bytes": 2**31} for speed in (10.0, 30.0, 20.0)]
    assert not list(gpu_day.beside(part, tmp_path))
    bench_leaves(tmp_path, part, {"ours": rounds, "whole": [*rounds[:1], {"error": "no result after 240 s"}]})
    (row,) = gpu_day.beside(part, tmp_path)
    assert row == "| dense, 8B in 4 layers | 20 | 10 |  | 2.00 |  | whole: no result after 240 s |"
    (tmp_path / "dry" / part.folder).mkdir(parents=True)
    predicted = {"tokens_per_s_per_gpu": 1234.4, "peak_mem_bytes": 2**30}
    (tmp_path / "dry" / part.folder / "report.json").write_text(json.dumps({"predicted": predicted}))
    (row,) = gpu_day.beside(part, tmp_path)
    assert "| 20 | 10 | 1,234 | 2.00 | 1.00 |" in row


@pytest.mark.parametrize(("found", "code"), [({"ours": [{"error": "why"}]}, 1), ({"ours": [{}]}, 0)])
def test_a_job_of_which_ours_failed_has_failed(found, code, tmp_path, monkeypatch):
    """`tools.bench` exits with 0 whatever contenders do."""
    part = Part("job", 1, (), (), ("train.steps=1",))
    monkeypatch.setattr(gpu_day, "ran", lambda *_: (bench_leaves(tmp_path, part, found), (0, ""))[1])
    monkeypatch.setattr(gpu_day, "beside", lambda *_: ())
    monkeypatch.setattr(gpu_day, "PARTS", (part,))
    assert main(["--out", str(tmp_path)]) == code


def test_what_fails_or_takes_too_long_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    parts = (
        Part("too long", 0.02, ("timeit", "-n", "1", "-r", "1", "import time; print('begun', flush=True); time.sleep(60)"), ()),
        Part("fails", 1, ("json.tool", "nowhere"), ()),
        Part("of GPUs alone", 1, ("this", "never"), None),
        Part("well", 1, ("platform",), ()),
    )
    monkeypatch.setattr(gpu_day, "PARTS", parts)
    assert main(["--out", str(tmp_path), "--device", "cpu"]) == 1
    said = (tmp_path / gpu_day.REPORT).read_text()
    assert "## too long" in said and "exit 124\n\n```\nbegun" in said
    assert "No such file" in said and "Linux" in said.partition("## well")[2] and "never" not in said
    assert "1 of 3 parts done" in capsys.readouterr().out


def test_no_part_begins_once_the_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_day, "PARTS", (Part("well", 1, ("platform",), ()),))
    assert main(["--out", str(tmp_path), "--minutes", "0"]) == 1
    assert "no time was left" in (tmp_path / gpu_day.REPORT).read_text()
