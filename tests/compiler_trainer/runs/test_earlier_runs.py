"""Runs of earlier commits, named by commit, can be read; an unsupported format is reported first."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compiler_trainer import checkpoint
from compiler_trainer.config.errors import UserError
from compiler_trainer.runs.saved import options_of
from compiler_trainer.training.checkpoints import check_meaning

RUNS = sorted((Path(__file__).parents[2] / "data" / "earlier").iterdir())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_run_of_an_earlier_commit_is_read_and_may_go_on(run):
    cfg = options_of(run, ["train.steps=5", "optim.lr=0.5"])
    assert cfg.train.steps == 5 and cfg.optim.lr == 0.5 and cfg.model.dim == 8
    (path,) = checkpoint.complete(run / "checkpoints")
    assert "tensors in 1 file," in checkpoint.check(path)
    stored = checkpoint.opened(path)
    check_meaning(cfg, stored.index.config, str(path))
    assert stored.index.step == 3 and checkpoint.read_model(path)["tok_embeddings.weight"].shape[1] == 8


def test_a_format_that_is_not_read_is_said_before_options_are_looked_at(tmp_path):
    shutil.copytree(RUNS[0], tmp_path / "run")
    (step,) = checkpoint.complete(tmp_path / "run" / "checkpoints")
    (step / "index.json").rename(step / ".metadata")
    (tmp_path / "run" / "config.yaml").write_text("model: {no_such: 1}")
    with pytest.raises(UserError, match="was written in another version's format, of torch.distributed.checkpoint"):
        options_of(tmp_path / "run", [])


def test_what_was_saved_is_not_resolved_and_what_is_given_is(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "hush")
    shutil.copytree(RUNS[0], tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("tokenizer: bytes", "tokenizer: ${oc.env:SECRET}").replace("document_separator: null", "document_separator: ${x}"))
    assert (found := options_of(tmp_path / "run", ["train.seed=${train.steps}"]).data).tokenizer == "${oc.env:SECRET}"
    assert found.document_separator == "${x}"
    assert options_of(tmp_path / "run", ["train.seed=${train.steps}"]).train.seed == 3
    assert options_of(tmp_path / "run", ["data=synthetic"]).data.tokenizer == "${oc.env:SECRET}"
