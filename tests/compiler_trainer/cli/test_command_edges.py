"""Commands on runs with DPO, validation files, prompts, budgets and devices without a cluster."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from compiler_trainer import UserError
from compiler_trainer.cli.verbs.eval import evaluated_config
from compiler_trainer.cli.verbs.plan import varied_values
from compiler_trainer.cli.verbs.profile import QUIET
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.jobs import quoted
from compiler_trainer.config.schema import save
from compiler_trainer.config.validate import validate
from compiler_trainer.planning.plan import Question
from compiler_trainer.planning.space import Candidate, replace_nested
from compiler_trainer.runs.check_export import check_export_alone
from compiler_trainer.runs.saved import options_of
from compiler_trainer.sweep import point
from passes.cost.rates import Curve


def job(*options: str):
    return to_config(compose(list(options)))


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        ("loss=dpo", "data=text", "data.files=[a.jsonl]", "data.pairs=true", "data.chat=true", "data.tokenizer=t.json", "model.attention=documents"),
        ("train.microbatches=2", "passes.communication.batch_overlap=2"),
    ],
    ids=["dpo", "overlap"],
)
def test_an_export_of_any_loss_and_accumulation_is_compared(options, tmp_path):
    cfg = job(*options, f"run.dir={tmp_path}/run", "checkpoint.resume=latest")
    with pytest.raises(UserError, match="contains no complete checkpoint"):
        check_export_alone(cfg, tmp_path / "out")


def run_of(tmp_path, *options: str):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    save(job(*options, f"run.dir={tmp_path}/run"), tmp_path / "run" / "config.yaml")
    return tmp_path / "run"


def test_validation_files_are_validation_data(tmp_path):
    run = run_of(tmp_path, "data=text", "data.files=[a.txt]", "data.tokenizer=bytes", "data.eval_fraction=0", "data.validation=[{files:[v.txt]}]")
    assert evaluated_config(run, [], None)[1] is False


def test_other_tokens_are_other_text(tmp_path):
    run = run_of(tmp_path, "data=tokens", "data.tokens=a", "data.tokenizer=bytes")
    cfg, other = evaluated_config(run, ["data.tokens=b"], None)
    assert other and cfg.eval.batches is None


def test_a_profile_needs_no_evaluation():
    cfg = job("data.tokenizer=bytes", "eval.prompts=[Once]")
    assert validate(replace_nested(cfg, QUIET), 1).eval.prompts == ()


def test_an_objective_that_is_no_number_is_none(monkeypatch):
    monkeypatch.setattr(point, "stop_ranks", lambda: None)
    assert point.attempt(job(), lambda cfg: math.nan) == (None, None)
    assert point.attempt(job(), lambda cfg: 2.0) == (2.0, None)


def test_a_suggested_recomputation_leaves_no_budget():
    cfg = job("passes.remat.policy=budget", "passes.remat.budget_gib=60")
    setting = Candidate(replace(cfg.mesh, dp_shard=1), recompute="none")
    assert validate(setting.applied(cfg), 1).passes.remat.budget_gib is None


def test_a_mesh_to_plan_is_not_stated():
    cfg = job("mesh=auto", "cluster=h100", "cluster.gpus=16")
    requests = [Question(cfg, overrides, frozenset()).request for overrides in ((), ("mesh=auto",))]
    assert requests[0].stated == requests[1].stated


def test_a_size_next_to_the_last_point_of_a_curve_has_a_rate():
    assert Curve(((1, 1), (2147000000.0000002, 2))).at(2147000000) == pytest.approx(2)


@pytest.mark.parametrize(("argument", "expected"), [
    ("data.files=[e/ü.txt,b.txt]", 'data.files=["e/ü.txt",b.txt]'),
    ("run.dir=läufe/a", 'run.dir="läufe/a"'),
    ("data.files=['e/ü.txt']", "data.files=['e/ü.txt']"),
    ('data.files=["ü b",ä]', 'data.files=["ü b","ä"]'),
    ("optim={name: naïve, lr: 1}", 'optim={name: "naïve", lr: 1}'),
    ("run.dir=plain", "run.dir=plain"),
    ("run.dir=meine läufe/a", 'run.dir="meine läufe/a"'),
    (r"data.files=[a\,ü,b]", 'data.files=["a,ü",b]'),
    (r"data.files=['it\'s ü',b]", r"data.files=['it\'s ü',b]"),
    ("checkpoint.store=s3://ü/x", 'checkpoint.store="s3://ü/x"'),
    ("run.dir=${oc.env:HOME}/ü", 'run.dir="${oc.env:HOME}/ü"'),
    ("run.dir=a,ü", 'run.dir=a,"ü"'),
    ("ü", "ü"),
])
def test_words_with_letters_that_hydra_does_not_know_are_quoted(argument, expected):
    assert quoted(argument) == quoted(expected) == expected


@pytest.mark.parametrize("first", [["data=text"], ["data=text", "-c=job"], ["-cd=.", "data=text"]])
def test_a_file_with_an_umlaut_is_read(first, tmp_path):
    (tmp_path / "ü.txt").write_text("text " * 400)
    job = [*first, "data.files=[ü.txt]", "train.seq_len=16", "run.dir=läuft", "--cfg", "job"]
    done = subprocess.run([sys.executable, "-m", "compiler_trainer", *job], cwd=tmp_path, capture_output=True, text=True)
    assert "- ü.txt" in done.stdout and "dir: läuft" in done.stdout, done.stderr


def test_letters_that_hydra_does_not_know_are_taken_by_runs_and_by_vary(tmp_path):
    assert options_of(run_of(tmp_path), ["checkpoint.store=s3://größe"]).checkpoint.store == "s3://größe"
    assert [values["run.dir"] for values in varied_values(["run.dir=größe,a"])] == ['"größe"', "a"]
