"""README and docs/ name existing options, files, links, metrics and imports, with the right defaults."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from doc_pages import PAGES, ROOT, spans
from omegaconf import OmegaConf

from compiler_trainer.capture.returned import RESERVED
from compiler_trainer.config.compose import defaults
from compiler_trainer.config.descriptions import groups
from compiler_trainer.config.files import CONF
from compiler_trainer.config.schema import Config, ExpertsConfig, LatentConfig, LoraConfig, MeshConfig, RopeScaling
from compiler_trainer.training.anomalies import RANKS
from compiler_trainer.training.metrics import of_routers, unevenness
from compiler_trainer.training.speed import speed
from tests.nightly.parity.models.kind import MEANS

named = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))

OPTION = re.compile(r"(?<![\w./-])([a-z][a-z0-9_]*(?:\.[a-z_][a-z0-9_]*)+)(?:=(.*))?$")
RUN_ATTRIBUTES = ("run.stop", "run.state_dict", "run.step", "run.step.measure", "run.cfg", "run.folder", "run.rank", "run.done")  # attributes of a callback's argument
USER_ARGUMENTS = ("model.width", "loss.weight", "loss._target_", "model._target_")  # arguments of a user's module or loss
ENDINGS = (".py", ".md", ".yaml", ".html", ".json", ".jsonl", ".csv", ".safetensors")
FILE = re.compile(r"^[\w*-]+(?:/[\w*.-]+)*/[\w*.-]*\.(?:py|md|yaml|js|txt)$|^(?:compiler_trainer|passes|tests|tools|conf)/[\w/*.-]*$")


@cache
def options() -> frozenset[str]:
    """Return the dotted names of all options and of their groups."""
    names = {option.name for group in groups() for option in group.options} | {group.name for group in groups()}
    parts = {"model.lora": LoraConfig, "model.experts": ExpertsConfig, "model.latent": LatentConfig, "model.rope_scaling": RopeScaling}
    inner = {f"{name}.{field.name}" for name, part in parts.items() for field in dataclasses.fields(part)}
    return frozenset(names | inner | {"model.path", "model.init", "model.attention", "model.lora", *USER_ARGUMENTS})


def option_names(text: str) -> list[str]:
    """Return the options that a text names between backticks."""
    first = {name.partition(".")[0] for name in options()}
    words = [word.strip("',()") for _, code in spans(text) for word in code.split()]
    dotted = [match[1] for word in words if (match := OPTION.match(word))]
    return [name for name in dotted if name.partition(".")[0] in first and not name.endswith(ENDINGS) and name not in RUN_ATTRIBUTES]


def is_option(name: str) -> bool:
    """Return True if the option exists, or is an entry of an option that takes a mapping."""
    owners = {name.rpartition(".")[0], name.rpartition(".")[0].rpartition(".")[0]}
    return name in options() or bool(owners & {"optim.arguments", "lr_schedule.arguments", "data.arguments", "optim.groups", "optim.groups.no_decay", "hydra.launcher", "hydra.sweeper", "passes.remat.ops"})


@named
def test_options_that_a_page_names_are_there(page):
    assert [name for name in option_names(page.read_text()) if not is_option(name) and not is_module(name)] == []


def is_module(name: str) -> bool:
    """Return True if a dotted name belongs to a package of this repository or to torch."""
    return (ROOT / name.split(".")[0]).is_dir() or name.split(".")[0] in ("torch",)


def test_a_misspelt_option_is_found():
    assert [name for name in option_names("set `optim.lrr=1` or `mesh.tp`") if not is_option(name)] == ["optim.lrr"]


@named
def test_values_after_an_option_are_its_defaults(page):
    """A page that writes `passes.context.block` (128) states the default 128."""
    page_text = " ".join(page.read_text().split())
    for name, value in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)` \(([\d.,]+) ?(?:%|s|steps)?\)", page_text):
        if name in options():
            default = OmegaConf.select(OmegaConf.merge(defaults()), name)
            wanted = float(value.replace(",", ""))
            assert default in (wanted, wanted / 100), f"{page.name}: {name} ({value}); the default is {default}"


@named
def test_choices_that_a_page_names_are_there(page):
    kinds = [path.name for path in CONF.iterdir() if path.is_dir() and path.name != "__pycache__"]
    for group, choice in re.findall(rf"(?<![\w.=])({'|'.join(kinds)})=([a-z0-9_]+)\b(?![./:])", page.read_text()):
        other_choices = {"desk", "reader", "hf", "decoder", "auto", "rows", *MEANS}  # MEANS are losses of the parity tool
        assert choice in other_choices or (CONF / group / f"{choice}.yaml").exists(), f"{page.name}: {group}={choice}"


@named
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}, target


@named
def test_files_that_a_page_names_are_there(page):
    examples = ("conf/model/reader.yaml", "notes/*.jsonl", "tests/passes/autograd/test_fold_scales.py", "passes/autograd/fold_scales.py",
            "mine/cluster/desk.yaml", "systems/*", "perf_recipes/*", "src/graph/*", "runs/*", "graphs/*", "N/plan.yaml", "0/*", "RUN/*")
    for _, code in spans(page.read_text()):
        if FILE.match(code) and not any(fnmatch.fnmatch(code, pattern) for pattern in examples):
            assert list(ROOT.glob(code.rstrip("/"))), f"{page.name}: {code}"


def test_the_page_of_metrics_has_every_key_that_a_run_may_write(tmp_path):
    """The page lists the trainer's reserved keys, and nothing else writes other keys into a record."""
    page = (ROOT / "docs/reference/metrics.md").read_text()
    keys = [key for row in re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE) for key in re.findall(r"`([^`]+)`", row)]
    assert {key.partition("/")[0] for key in keys} >= RESERVED and len(set(keys)) == len(keys)
    experts = unevenness(of_routers({"model.layers.0.router.load": torch.tensor([0.25, 0.75]), "model.layers.0.router.auxiliary": torch.tensor(1.0)}))
    assert len(experts) == 5 and "cp_imbalance" in RESERVED
    assert {key.partition("/")[0] for key in (*RANKS, *experts, *speed(Config(mesh=MeshConfig(dp_shard=1)), 1, 1, 1.0))} <= RESERVED
    from doc_places import furnish, run_of

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        furnish(tmp_path)
        lines = (run_of("decoder") / "metrics.jsonl").read_text().splitlines()
    assert {key.partition("/")[0] for line in lines for key in json.loads(line)} <= RESERVED


def test_words_that_newcomers_search_for_are_there():
    text = "\n".join(page.read_text() for page in PAGES).lower()
    words = ("gradient accumulation", "activation checkpointing", "mixed precision", "bf16", "fine-tun", "out of memory", "oom",
             "troubleshoot", "fsdp", "tensor parallel", "context parallel", "ring attention", "expert parallel", "lora", "packing", "hf download")
    assert [word for word in words if word not in text] == []


def test_pages_have_no_numbers_in_their_names():
    assert [page for page in (ROOT / "docs").rglob("*.md") if re.match(r"\d", Path(page).name)] == []


IMPORTS = re.compile(r"^ *from ((?:passes|compiler_trainer|tools)[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def test_what_examples_import_is_there():
    """Every import of an example exists, except the file that a guide asks its reader to write."""
    shown = {(module, name.strip()) for page in PAGES for module, names in IMPORTS.findall(page.read_text()) for name in names.split(",")}
    missing = []
    for module, name in sorted(shown - {("passes.autograd.fold_scales", "FoldScales")}):
        if not hasattr(importlib.import_module(module), name):
            missing.append(f"{module}.{name}")
    assert len(shown) > 5 and not missing
