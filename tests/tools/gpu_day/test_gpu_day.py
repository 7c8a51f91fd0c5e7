"""Half an hour with a GPU: every part's options compose, and what fails or takes too long is written down."""

from __future__ import annotations

import pytest

from compiler_trainer.config.compose import compose, typed
from tools import gpu_day
from tools.bench.job import composed
from tools.gpu_day import PARTS, Part, main


@pytest.mark.parametrize("part", [part for part in PARTS if part.job], ids=lambda part: part.name)
def test_options_of_jobs_compose(part):
    cfg = typed(compose(part.options("cuda")))
    assert cfg.train.seq_len >= 4096
    if part.small is not None:
        assert composed(part.options("cpu"), 1).model.dim == 128


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
