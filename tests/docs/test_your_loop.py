"""Every example of docs/guides/your-loop.md runs and gives the values that the page states."""

from __future__ import annotations

import contextlib
import copy
import importlib
import re
import shutil
from dataclasses import replace

import pytest
import torch
from commands import call
from doc_pages import ROOT
from doc_places import furnish, tiny
from oracle import LRS, assert_same, compile_lockstep, llama, llama_loss, perceptron, points, squared_error, train_step
from oracle import batches as token_batches

import compiler_trainer as ct
from compiler_trainer import api, checkpoint
from compiler_trainer.config.schema import Config
from compiler_trainer.models.loss import loss_of_logits
from compiler_trainer.training.metrics import read
from passes.ir.printer import print_program

PAGE = (ROOT / "docs/guides/your-loop.md").read_text()
SCRIPTS = [text for text in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE) if not text.startswith("# my_")]
QUIET = {"lower": {"backend": "eager"}, "checkpoint": {"interval": None}, "eval": {"interval": None}}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Import the page's modules in a folder with all files that the pages name."""
    folder = tmp_path_factory.mktemp("loop")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        furnish(folder)
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("my_parts")


def trained(folder, steps=4, **options):
    """Train a small run; return its records and its trainer."""
    train = {"steps": steps, "seq_len": 32, "global_batch_size": 4}
    defaults = {"model": {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 24}, "data": "synthetic", "train": train}
    trainer = ct.Trainer(**defaults | QUIET | {"run": {"dir": str(folder), "dump_graphs": False}} | options)
    trainer.train()
    return read(folder / "metrics.jsonl"), trainer


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.split("(")[0].split()[-1])
def test_scripts_run(script, parts, tmp_path, monkeypatch):
    real = api.on_ranks

    def little(cfg, callbacks):
        small = cfg if cfg.data.name == "custom" else tiny(cfg, tmp_path / "run")
        train = replace(small.train, steps=4)
        overrides = {"train": train, "lower": replace(small.lower, backend="eager"), "run": replace(small.run, dir=str(tmp_path / "run"))}
        return real(replace(small, **overrides), callbacks)

    monkeypatch.setattr(api, "on_ranks", little)
    exec(script, names := {"__name__": "script"})
    assert len(read(tmp_path / "run/metrics.jsonl")) == 4
    if "weights" in names:
        assert names["weights"]["mix.weight"].shape == (64, 64) and names["loss"] < 6


def test_the_example_of_the_readme_runs(parts, tmp_path, monkeypatch):
    real, seen = api.on_ranks, []

    def little(cfg, callbacks):
        seen.append(cfg)
        run = replace(cfg.run, dir=str(tmp_path / "run"), loggers=())
        overrides = {"train": replace(cfg.train, steps=2, seq_len=32), "mesh": Config().mesh, "lower": replace(cfg.lower, backend="eager")}
        return real(replace(cfg, run=run, **overrides), callbacks)

    class Steps(ct.Callback):
        def on_step(self, run, record):
            seen.append(record["step"])

    monkeypatch.setattr(api, "on_ranks", little)
    monkeypatch.setattr(ct, "WandB", parts.Csv, raising=False)
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL) if "Trainer" in text]
    model = importlib.import_module("my_package").Reader()
    block = block.replace("project=", "path=")
    exec(block, {"model": model, "loss": loss_of_logits, "dataset": parts.Counting(), "MyCallback": Steps})
    cfg, *steps = seen
    assert (cfg.train.steps, cfg.train.seq_len, cfg.mesh.dp_shard, len(cfg.run.loggers), steps) == (1000, 1024, 8, 1, [1, 2])


def test_the_callback_ends_the_run(parts, tmp_path, capsys):
    records, _ = trained(tmp_path / "free", 12, optim={"lr": 0.05})
    below = next(number for number, record in enumerate(records[1:], 2) if record["loss"] < records[0]["loss"] - 0.2)
    stop = records[0]["loss"] - 0.2
    ended, trainer = trained(tmp_path / "run", 12, optim={"lr": 0.05}, callbacks=[parts.StopBelow(stop)])
    assert len(ended) == below < 12 and [r["loss"] for r in ended] == [r["loss"] for r in records[:below]]
    assert f"ended after step {below} of 12: the loss is below {stop}\n" in capsys.readouterr().out


def test_the_logger_writes_what_metrics_has(parts, tmp_path):
    path = tmp_path / "loss.csv"
    records, _ = trained(tmp_path / "run", loggers=[{"_target_": parts.Csv, "path": str(path)}])
    assert path.read_text().splitlines() == [f"{each['step']},{each['loss']}" for each in records]


def test_the_optimizer_updates_as_a_plain_loop_does(parts):
    optim = {"name": "custom", "_target_": "my_parts.Lion", "arguments": {"beta1": 0.8, "weight_decay": 0.1}, "max_norm": 0.5}
    optim["groups"] = {"no_decay": {"kinds": ["vector"], "weight_decay": 0.0}}
    model, data = perceptron(), points()
    step = compile_lockstep(model, squared_error, data[0], {"dp_shard": 2, "tp": 2}, optim)
    train_step(step, data)
    plain = copy.deepcopy(model)
    parameters = {n: p for n, p in plain.named_parameters() if p.requires_grad and n != "unused"}
    momenta = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for batch, lr in zip(data, LRS, strict=True):
        plain.zero_grad()
        squared_error(plain, batch).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        with torch.no_grad():
            for name, p in parameters.items():
                direction = torch.sign(0.8 * momenta[name] + 0.2 * p.grad)
                p.mul_(1 - lr * (0.1 if p.dim() > 1 else 0.0)).sub_(lr * direction)
                momenta[name] = 0.99 * momenta[name] + 0.01 * p.grad
    assert_same(step.state_dict(), dict(plain.state_dict()), 1e-10)


def test_the_schedule_gives_the_rates(parts, tmp_path):
    records, _ = trained(tmp_path / "run", optim={"lr": 0.01}, lr_schedule={"_target_": parts.triangle, "arguments": {"peak": 0.5}})
    assert [each["lr"] for each in records] == pytest.approx([0.004, 0.008, 0.008, 0.004])


def test_the_dataset_gives_the_rows_and_a_resumed_run_reads_on(parts, tmp_path):
    seen = []

    class Seen(ct.Callback):
        def on_step(self, run, record):
            seen.append(record["loss"])

    options = {"data": parts.Counting(40), "model": {"_target_": "my_package.Reader"}, "callbacks": [Seen()], "checkpoint": {"interval": 2, "resume": "auto"}}
    whole, trainer = trained(tmp_path / "whole", 6, **options)
    cut = {**options, "callbacks": [Seen(), parts.StopBelow(100.0)]}
    assert len(trained(tmp_path / "cut", 6, **cut)[0]) == 1
    resumed, _ = trained(tmp_path / "cut", 6, **options)
    assert [r["loss"] for r in resumed] == [r["loss"] for r in whole] and [r["tokens"] for r in whole] == [128 * n for n in range(1, 7)]
    assert len(seen) == 6 + 1 + 5
    with pytest.raises(ct.UserError, match="^data: these rows are .* those of the saved data state"):
        trained(tmp_path / "cut", 8, **options | {"data": parts.Counting(41)})


def test_a_run_of_all_parts_resumes_by_command_as_if_it_had_not_been_interrupted(parts, tmp_path):
    words = [
        "model=custom", "model._target_=my_package.Reader", "model.width=8", "data=custom", "data._target_=my_parts.Counting",
        "optim=custom", "optim._target_=my_parts.Lion", "optim.arguments.beta1=0.8", "optim.lr=1e-3", "lr_schedule=custom",
        "lr_schedule._target_=my_parts.triangle", "lr_schedule.arguments.peak=0.5", "passes.extra=[{_target_: my_parts.TanhGelu}]",
        "passes.rules=[my_rules]", "train.callbacks=[{_target_: my_parts.StopBelow, loss: 0.1}]", "train.ema=0.9", "train.steps=4",
        "train.seq_len=32", "lower.backend=eager", "eval.interval=null", "checkpoint.interval=2", "run.dump_graphs=false",
    ]  # fmt: skip
    for name in ("whole", "cut"):
        assert call(*words, f"run.dir={tmp_path / name}", f"run.loggers=[{{_target_: my_parts.Csv, path: {tmp_path / name}.csv}}]") == 0
    shutil.rmtree(tmp_path / "cut/checkpoints/step_00000004")
    assert len(read(tmp_path / "cut/metrics.jsonl")) == 4 and call("resume", tmp_path / "cut") == 0
    whole, cut = (read(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    assert [(r["loss"], r["grad_norm"], r["lr"]) for r in cut] == [(r["loss"], r["grad_norm"], r["lr"]) for r in whole]
    steps = [line.partition(",")[0] for line in (tmp_path / "cut.csv").read_text().splitlines()]
    assert steps == ["1", "2", "3", "4", "3", "4"]
    averages = [checkpoint.read_averaged(tmp_path / name / "checkpoints/step_00000004") for name in ("whole", "cut")]
    assert all(torch.equal(value, averages[1][name]) for name, value in averages[0].items())


def test_the_pass_makes_of_a_model_what_it_says(parts):
    data, activation = points(), {kind: torch.nn.GELU(kind) for kind in ("none", "tanh")}
    steps = [
        compile_lockstep(perceptron(activation[kind]), squared_error, data[0], {"dp_shard": 2}, passes={"extra": extra})
        for kind, extra in (("none", [{"_target_": "my_parts.TanhGelu"}]), ("tanh", []), ("none", []))
    ]
    passed, tanh, exact = ([step(batch)["loss"] for batch in data] for step in steps)
    assert passed == tanh != exact


def test_the_rule_lets_its_operator_run_on_shards(parts):
    def doubled(model, batch):
        return llama_loss(lambda *args: torch.ops.my_parts.double(model(*args)), batch)

    importlib.import_module("my_rules")  # the operator, which the loss calls
    data, model = token_batches(), llama()

    lines = []

    def observe(program, record):
        lines.extend(print_program(program).splitlines() * (record.name == "shard"))

    step = compile_lockstep(model, doubled, data[0], {"dp_shard": 2, "tp": 2}, passes={"rules": ["my_rules"]}, observe=observe)
    (call,) = [line for line in lines if "= local.double" in line]
    assert "f64[3, 7, 31] [5@dp_shard, 7, 61@tp]" in call  # without the rule: f64[5, 7, 61] [5, 7, 61]
    with torch.no_grad():
        logits = 2 * model(data[0]["tokens"], data[0]["positions"])
        wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data[0]["labels"].flatten(), ignore_index=-100)
    assert step(data[0])["loss"] == pytest.approx(float(wanted), abs=1e-10)
