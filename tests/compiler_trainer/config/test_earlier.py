"""Removed options are ignored with a message, unless stored numbers depend on them."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from compiler_trainer.config import earlier
from compiler_trainer.config.earlier import load_options, tell
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.options import build
from compiler_trainer.config.schema import CommunicationConfig, Config, ReplicaCheckConfig, SegmentConfig, load, save


def written(**changes):
    options = yaml.safe_load(yaml.safe_dump(plain(dataclasses.asdict(Config()))))
    for name, value in changes.items():
        group, _, last = name.rpartition("__")
        entries = options
        for part in group.split("__") if group else ():
            entries = entries[part]
        entries[last] = value
    return options


def plain(value):
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, tuple | list) else value


def test_options_without_meaning_for_stored_numbers_are_said_once_and_passed_over(capsys):
    tell.cache_clear()
    options = written(plan__headroom=0.1, cluster__hbm_efficiency=0.9, passes__shard__old=1, gone={"a": 1})
    for _ in range(2):
        cfg = load_options(Config, options, "config.yaml")
    assert cfg == dataclasses.replace(Config(), run=cfg.run)
    lines = capsys.readouterr().err.splitlines()
    names = ["plan.headroom", "cluster.hbm_efficiency", "passes.shard.old", "gone"]
    assert sorted(lines) == sorted(f"config.yaml: {name} is no longer an option and is ignored" for name in names)


@pytest.mark.parametrize("name", ["model__depth", "optim__epsilon2"])
def test_an_option_that_may_mean_something_is_refused(name):
    with pytest.raises(UserError, match="no such option"):
        load_options(Config, written(**{name: 1}), "config.yaml")


def test_a_renamed_option_has_its_new_name_and_value(monkeypatch):
    monkeypatch.setattr(earlier, "RENAMED", {("eval.every", 0): ("eval.interval", 7)})
    options = written(eval__every=0)
    assert load_options(Config, options, "x").eval.interval == 7 and options["eval"]["every"] == 0
    monkeypatch.setattr(earlier, "RENAMED", {("eval.interval", 500): ("eval.interval", 7)})
    assert load_options(Config, written(eval__interval=500), "x").eval.interval == 7


@pytest.mark.parametrize(("group", "options", "now"), [
    ("eval", {"interval": 0}, {"interval": None}), ("eval", {"interval": 50}, {"interval": 50}),
    ("checkpoint", {"enabled": False, "interval": 3, "keep_every": 0}, {"interval": None, "keep_every": None}),
    ("checkpoint", {"enabled": True, "interval": 3, "keep_every": 10}, {"interval": 3, "keep_every": 10}),
    ("run", {"pace_interval": 0}, {"pace_interval": None}),
    ("passes", {"segment": {"enabled": False, "max_nodes": 9}, "verify": "off"}, {"segment": SegmentConfig(None), "verify": "none"}),
    ("passes", {"segment": {"enabled": True, "max_nodes": 9}}, {"segment": SegmentConfig(9)}),
    ("passes", {"roll": False, "schedule": {"bucket_mib": 3.0, "ahead": 2}},
     {"fold_layers": False, "communication": CommunicationConfig(3.0, 2)}),
    ("train", {"replica_check": {"interval": 0}}, {"replica_check": ReplicaCheckConfig(None)}),
])
def test_off_has_one_word_now_and_runs_that_went_before_keep_theirs(group, options, now, capsys):
    loaded = getattr(load_options(Config, {group: options}, "x"), group)
    assert {name: getattr(loaded, name) for name in now} == now and not capsys.readouterr().err


@pytest.mark.parametrize("name", ["eval.interval", "checkpoint.interval", "checkpoint.keep_every", "run.pace_interval", "train.replica_check.interval"])
def test_never_is_null_and_not_0(name):
    *groups, last = name.split(".")
    options = {last: 0}
    for group in reversed(groups):
        options = {group: options}
    with pytest.raises(UserError, match=f"^{name}: 0 must be at least 1 .null: never.$"):
        build(Config, options)


def test_a_value_that_looks_like_an_interpolation_is_written_and_read_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "hush")
    cfg = dataclasses.replace(Config(), data=dataclasses.replace(Config().data, document_separator="${x}", tokenizer="${oc.env:SECRET}"))
    save(cfg, tmp_path / "config.yaml")
    assert load(tmp_path / "config.yaml") == cfg


def test_an_entry_of_a_list_that_is_gone_is_ignored_and_named(capsys):
    tell.cache_clear()
    cfg = load_options(Config, {"plan": {"recompute": ["none", "every_second", "full"]}}, "here.yaml")
    assert cfg.plan.recompute == ("none", "full")
    assert capsys.readouterr().err == "here.yaml: plan.recompute: every_second is no longer a choice and is ignored\n"
