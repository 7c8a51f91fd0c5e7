"""A YAML file of options is a job: it composes as the same options would, and its errors name file and line."""

from __future__ import annotations

import dataclasses

import pytest
from commands import call

from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.errors import STATED, UserError, with_line
from compiler_trainer.config.jobs import with_files
from compiler_trainer.config.schema import Config, load, save

PLAIN = "optim: muon\ntrain: {steps: 7}\noptim.lr: 1e-4\n"


@pytest.fixture(autouse=True)
def no_other_file():
    STATED.clear()


def of(*overrides: str) -> Config:
    """Return a job, without its run folder, whose name has the time."""
    cfg = to_config(compose(overrides))
    return dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, dir="x"))


@pytest.mark.parametrize("text", [
    PLAIN,
    f"# @package _global_\n{PLAIN}",
    "defaults: [_self_, override /optim: muon]\ntrain.steps: 7\noptim.lr: 0.0001\n",
    "optim: {name: muon, lr: 1e-4}\ntrain: {steps: 7}\nrecipe: null\nmesh:\n",
])  # fmt: skip
def test_it_is_the_job_of_its_options(text, tmp_path):
    path = tmp_path / "job.yml"
    path.write_text(text)
    assert of(str(path)) == of("optim=muon", "train.steps=7", "optim.lr=1e-4")


@pytest.mark.parametrize(("stated", "same"), [
    (["train.steps=9"], ["optim=muon", "train.steps=9", "optim.lr=1e-4"]),
    (["optim=sgd"], ["optim=sgd", "train.steps=7"]),
    (["optim.lr=1"], ["optim=muon", "train.steps=7", "optim.lr=1"]),
])  # fmt: skip
@pytest.mark.parametrize("is_first", [True, False])
def test_other_arguments_win(stated, same, is_first, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(PLAIN)
    assert of(*([str(path), *stated] if is_first else [*stated, str(path)])) == of(*same)


ODD = "data.files=['a b', \"it's, [x]\", 'ü\\n', null, '1e5', 'x: {y}', '', '$HOME', '\\\\']".replace("null", "'null'")
JOBS = {
    "default": [],
    "cluster": ["cluster=h100", "cluster.gpus=8"],
    "no groups": ["optim=sgd", "optim.momentum=0.9"],
    "fewer groups": ["optim=muon", "~optim.groups.no_decay"],
    "tables": ["passes.remat.layers={layers.\\[01\\]:full}", "optim.groups.x={names:['a.*','b c'],lr:0}"],
    "folder": ["recipe=lora", "model.path=FOLDER", "model.lora.targets=[q_proj]"],
    "pairs": ["recipe=simpo", "model.path=FOLDER"],
    "a class": ["model=custom", "model._target_=a.B", "model.width=3"],
    "a loss": ["loss._target_=a.b", "loss.scale=3"],
    "an optimizer": ["optim=custom", "optim._target_=a.B", "optim.arguments.beta=0.5", "lr_schedule=wsd"],
    "experts": ["model=deepseek_v3_16b", "mesh.ep=2"],
    "odd texts": ["data=text", ODD, "run.loggers=[{_target_:a.B,tags:[a,b]}]", "data.document_separator='\\n'"],
}


@pytest.mark.parametrize("name", JOBS)
def test_the_config_of_a_run_starts_the_same_job_in_a_new_folder(name, tmp_path):
    """Whatever belongs to one run alone is left out: its folder, its copies, the checkpoint that it began with."""
    of_one_run = ["checkpoint.store=s3://bucket/a", "checkpoint.resume=auto", "checkpoint.dir=/kept"]
    save(to_config(compose([*JOBS[name], *of_one_run, "run.dir=runs/old"])), path := tmp_path / "config.yaml")
    cfg = to_config(compose([str(path)]))
    assert cfg.run.dir.startswith("runs/2") and of(str(path)) == of(*JOBS[name])


def test_the_shown_job_is_the_job(tmp_path, capfd):
    assert not call("optim=muon", "train.steps=7", "--cfg", "job")
    (tmp_path / "job.yaml").write_text(shown := capfd.readouterr().out)
    assert of(f"{tmp_path}/job.yaml") == of("optim=muon", "train.steps=7")
    assert load(tmp_path / "job.yaml").optim.name == "muon" and "steps: 7" in shown


@pytest.mark.parametrize(("text", "message"), [
    ("train:\n  steps: 7\n  learning_rate: 1e-4\n", "{path}:3: train.learning_rate: no such option; the learning rate is optim.lr"),
    ("train: {stepz: 7}\n", "{path}:1: train.stepz: no such option; did you mean 'steps'?"),
    ("\ntrain.seed: often\n", "{path}:2: train.seed: 'often' is not a whole number"),
    ("optim:\n  groups:\n    a: {kinds: [head], lrr: 3}\n", "{path}:2: optim.groups.a.lrr: no such option; did you mean 'lr'?"),
    ("model:\n  path: a\n  lora:\n    ranks: 8\n", "{path}:4: model.lora.ranks: no such option; did you mean 'rank'?"),
    ("recipe: loora\n", "{path}:1: recipe: 'loora' is not one of"),
    ("training: {steps: 5}\n", "{path}:1: training.steps: no such option; there is train.steps"),
    ("a b: 3\n", "{path}:1: 'a b' is not the name of an option"),
    ("optim: {groups: {größe: {names: [a], lr: 0.5}}}\n", "{path}:1: optim.groups: 'größe' cannot be the name of an entry"),
    ("optim: {lr: 1,\n  groups: {'1': {names: [a], lr: 0.5}}}\n", "{path}:2: optim.groups: '1' cannot be the name of an entry"),
    ("passes: {cast: {modules: {a#b: float32}}}\n", "{path}:1: passes.cast.modules: 'a#b' cannot be the name of an entry"),
    ("passes: {cast: {modules: {'': float32}}}\n", "{path}:1: passes.cast.modules: '' cannot be the name of an entry"),
    ("- a\n", "{path}: holds no options"),
    ("train: {steps: [7\n", "{path}: is not valid YAML"),
])  # fmt: skip
def test_an_error_names_file_and_line(text, message, tmp_path, capfd):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    for flags in ([], ["--cfg", "job"]):
        assert call(str(path), *flags) == 2
        assert capfd.readouterr().err.startswith(f"error: {message.format(path=path)}")


def test_an_error_of_the_command_line_names_no_file(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("data: {name: text, files: [a]}\n")
    with pytest.raises(UserError) as caught:
        to_config(compose([str(path), "data.seed=often"]))
    assert with_line(caught.value).startswith("data.seed: 'often'")


@pytest.mark.parametrize(("arguments", "message"), [
    (["nowhere.yaml"], "nowhere.yaml: cannot be read: No such file"),
    (["a.yaml", "b.yml"], "b.yml: is a job file, and so is a.yaml; write all options into one of them"),
])  # fmt: skip
def test_a_file_that_is_not_there_or_one_too_many(arguments, message):
    with pytest.raises(UserError, match=message):
        with_files(arguments)


def test_a_recipe_in_a_file_is_given_by_itself(capfd):
    assert call("recipe=job.yaml") == 2
    assert "which is given by itself: compiler-trainer job.yaml" in capfd.readouterr().err


def test_the_file_of_a_sweep_is_no_part_of_its_points(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("train.steps: 7\ntrain.seed: 1\n")
    assert with_files([str(path), "train.seed=1,2"]) == ["train.steps=7", "train.seed=1,2"]


@pytest.mark.parametrize("option", ["model.path", "model.lora.rank", "model.init"])
def test_help_knows_the_options_of_a_folder(option, capfd):
    assert not call("--help", option)
    assert option in capfd.readouterr().out


def test_an_option_of_another_choice_says_which(capfd):
    assert call("model.path=qwen") == 2
    assert "model.path: goes with model=hf" in capfd.readouterr().err
