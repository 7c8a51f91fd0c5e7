"""The Python trainer equals the command line: same options, same run; parts are stored by name or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import strangers
import torch
from commands import call
from oracle import assert_same
from short_runs import FakeStep, metrics, timeless

import compiler_trainer as ct
from compiler_trainer import api, checkpoint
from compiler_trainer.config import schema
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.targets import GIVEN
from compiler_trainer.models.loss import loss_of_logits
from compiler_trainer.training import trainer as training

DECODER = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 24}
READER = {"_target_": "strangers.Reader", "width": 6, "vocabulary": 257}
WORDS = [f"model.{name}={value}" for name, value in DECODER.items()]
SMALL = {
    "train": {"steps": 4, "seq_len": 16, "global_batch_size": 4},
    "data": {"name": "synthetic", "documents": 40},
    "lower": {"backend": "eager"},
    "eval": {"interval": 2, "batches": 1},
    "checkpoint": {"interval": 2},
}


@pytest.fixture
def fake(monkeypatch):
    """Replace the compiled step with `FakeStep`."""
    monkeypatch.setattr(training, "compile_step", FakeStep)


def doubled(model, batch):
    """Return twice the loss."""
    return 2 * loss_of_logits(model, batch)


class Notes(ct.Callback):
    def __init__(self):
        self.losses = []

    def on_step(self, run, record):
        self.losses.append(record["loss"])


def trainer(folder, **options):
    return ct.Trainer(**SMALL | {"run": {"dir": str(folder), "dump_graphs": False}} | options)


def undated(cfg):
    return replace(cfg, run=replace(cfg.run, dir="here"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, []),
        ({"model": "llama3_8b"}, ["model=llama3_8b"]),
        ({"model": DECODER}, WORDS),
        ({"model": READER}, ["model=custom", "model._target_=strangers.Reader", "model.width=6", "model.vocabulary=257"]),
        ({"model": {"_target_": strangers.Reader, "width": 6}}, ["model=custom", "model._target_=strangers.Reader", "model.width=6"]),
        ({"model": {"path": "qwen", "lora": {"rank": 2}}}, ["model=hf", "model.path=qwen", "model.lora.rank=2"]),
        ({"optim": {"name": "muon", "lr": 0.1}}, ["optim=muon", "optim.lr=0.1"]),
        ({"optim": {"_target_": "a.B", "arguments": {"c": 1}}}, ["optim=custom", "optim._target_=a.B", "optim.arguments.c=1"]),
        ({"optim": {"betas": (0.8, 0.9)}, "mesh": "auto"}, ["optim.betas=[0.8,0.9]", "mesh=auto"]),
        ({"recipe": "pretrain", "model": "llama3_8b", "data": {"tokenizer": "TOK"}}, ["recipe=pretrain", "model=llama3_8b", "data.tokenizer=TOK"]),
        ({"loss": doubled}, ["loss._target_=test_api.doubled"]),
        ({"callbacks": [{"_target_": "a.B", "c": 1}], "loggers": [{"_target_": ct.WandB}], "train": {"steps": 3}},
         ["train.callbacks=[{_target_: a.B, c: 1}]", "run.loggers=[{_target_: compiler_trainer.training.loggers.WandB}]", "train.steps=3"]),
        ({"passes": {"extra": [{"_target_": "a.B"}], "rules": ["a.b"]}}, ["passes.extra=[{_target_: a.B}]", "passes.rules=[a.b]"]),
        ({"data": {"name": "mixture", "sources": [{"name": "custom", "_target_": strangers.Reader, "weight": 0.5}]}},
         ["data=mixture", "data.sources=[{name: custom, _target_: strangers.Reader, weight: 0.5}]"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_options_are_those_of_the_command_line(options, words):
    assert undated(ct.Trainer(**options).cfg) == undated(to_config(compose(words)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim": {"lrr": 1}}, "^optim.lrr: no such option; did you mean 'lr'"),
        ({"optimizer": {"lr": 1}}, "^optimizer: no such option; the optimizer is optim="),
        ({"optim": "lion"}, "^optim: 'lion' is not one of"),
        ({"train": {"steps": "many"}}, "^train.steps"),
        ({"callbacks": [ct.Callback()], "train": "long"}, "^train: 'long' is not a group of options; give a mapping"),
        ({"callbacks": [type("Local", (ct.Callback,), {})]}, "Local is not found by that name; define the class at the top"),
    ],
)
def test_what_is_no_option_is_refused_by_name(options, message):
    with pytest.raises(ct.UserError, match=message):
        ct.Trainer(**options)


def test_a_run_is_that_of_the_command_line(fake, tmp_path):
    notes = Notes()
    loss = trainer(tmp_path / "python", model=DECODER, callbacks=[notes]).train()
    flags = [f"{group}.{name}={value}" for group, options in SMALL.items() for name, value in options.items() if name != "name"]
    assert call("data=synthetic", *WORDS, *flags, f"run.dir={tmp_path / 'words'}", "run.dump_graphs=false") == 0
    assert timeless(metrics(tmp_path / "python")) == timeless(metrics(tmp_path / "words"))
    assert notes.losses == [each["loss"] for each in metrics(tmp_path / "words")] and loss == metrics(tmp_path / "words")[-1]["eval_loss"]


def test_a_module_begins_with_the_weights_that_it_has_and_stays_as_it_is(tmp_path):
    torch.manual_seed(7)
    model = strangers.Reader(6, 257)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    begun = []

    class First(ct.Callback):
        def on_start(self, run):
            begun.append(run.state_dict())

    of_module = trainer(tmp_path / "module", model=model, callbacks=[First()])
    with pytest.raises(RuntimeError, match="call train"):
        of_module.state_dict()
    of_module.train()
    assert all(torch.equal(before[name], value) for name, value in begun[0].items())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    trained = of_module.state_dict()
    assert trained.keys() == begun[0].keys() and not torch.equal(trained["embed.weight"], before["embed.weight"])
    by_name = trainer(tmp_path / "name", model=READER, train=SMALL["train"] | {"seed": 7})  # draws the same weights
    by_name.train()
    assert all(torch.equal(trained[name], value) for name, value in by_name.state_dict().items())


def test_a_loss_of_ones_own_is_trained(tmp_path):
    plain, twice = (trainer(tmp_path / name, model=READER, loss=loss) for name, loss in (("plain", None), ("twice", doubled)))
    plain.train(), twice.train()
    assert metrics(twice.folder)[0]["loss"] == pytest.approx(2 * metrics(plain.folder)[0]["loss"])
    closure = trainer(tmp_path / "closure", model=READER, loss=lambda model, batch: doubled(model, batch))
    closure.train()
    assert closure.cfg.loss["_target_"] == GIVEN
    assert timeless(metrics(closure.folder)) == timeless(metrics(twice.folder))


def test_a_part_of_a_script_is_named_where_it_is_lost(tmp_path):
    job = trainer(tmp_path / "run", callbacks=[{"_target_": "__main__.Notes"}])
    with pytest.raises(ct.UserError, match=r"^train.callbacks\[0\]._target_: .*; __main__.Notes is defined in a script: resume with that"):
        job.train()


def test_a_run_of_named_parts_resumes_by_command(fake, tmp_path):
    trainer(tmp_path / "run", model=READER, loss=doubled, callbacks=[{"_target_": ct.Callback}]).train()
    assert call("resume", tmp_path / "run", "train.steps=6") == 0
    assert [each["step"] for each in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"model": torch.nn.Embedding(257, 257)}, "error: model: Embedding: was passed to a Trainer in Python; resume with the script"),
        ({"callbacks": [Notes()]}, r"error: train.callbacks[0]: Notes: was passed to a Trainer"),
    ],
)
def test_a_run_of_objects_resumes_by_its_script_alone(part, message, fake, tmp_path, capsys):
    script = trainer(tmp_path / "run", **{"model": READER} | part)
    script.train()
    assert schema.load(tmp_path / "run/config.yaml") == script.run.cfg
    capsys.readouterr()
    assert call("resume", tmp_path / "run", "train.steps=6") == 2
    assert message in capsys.readouterr().err
    again = {"train": SMALL["train"] | {"steps": 6}, "checkpoint": {"interval": 2, "resume": "auto"}}
    trainer(tmp_path / "run", **{"model": READER} | part | again).train()
    assert [each["step"] for each in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("path", ["/m/qwen(1)", "/m/größe", "Qwen/Qwen3-0.6B"])
def test_any_path_of_a_model_is_taken_as_it_is(path):
    assert api.composed({"model": path}).model.path == path


class Codebook(torch.nn.Module):
    """Averages its inputs in a parameter without a gradient, which `forward` writes."""

    def __init__(self):
        super().__init__()
        self.mix, self.still = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).requires_grad_(False)
        self.center = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x):
        h = self.still(self.mix(x))
        with torch.no_grad():
            self.center.lerp_(h.detach().mean(0), 0.5)
        return h - self.center


class Points(torch.utils.data.Dataset):
    """64 points."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"x": torch.linspace(-1, i / 32, 4)}


class Spoil(ct.Callback):
    """Makes the average no number after step 3, once."""

    steps = 0

    def on_step(self, run, record):
        self.steps += 1
        if self.steps == 3:
            run.step.state["model.center"].local[0].fill_(torch.nan)


def away_from_one(model, batch):
    return (model(batch["x"]) - 1).square().mean()


def of_codebook(folder, *callbacks, **checkpoint):
    """Return the state after a run whose checkpoints lack frozen parameters."""
    torch.manual_seed(0)
    options = {"train": {"steps": 6, "global_batch_size": 4, "nonfinite": "rollback"}, "eval": {"interval": None}}
    options["checkpoint"] = {"interval": 2, "keep": 9, "frozen": False, **checkpoint}
    job = trainer(folder, model=Codebook(), loss=away_from_one, data=Points(), callbacks=callbacks, **options)
    job.train()
    return job.state_dict()


def test_checkpoints_without_frozen_parameters_have_those_that_the_model_writes(tmp_path):
    whole, start = of_codebook(tmp_path / "whole"), tmp_path / "whole/checkpoints/step_00000002"
    assert checkpoint.read_model(start).keys() == {"mix.weight", "mix.bias", "center"}
    assert_same(of_codebook(tmp_path / "cut", resume=str(start)), whole, 0)
    assert of_codebook(tmp_path / "spoiled", Spoil())["center"].isfinite().all()
