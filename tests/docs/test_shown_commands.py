"""Every command in README and docs/ works: it composes, passes a dry run, or runs at a small size."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import math
import re
import shlex
import shutil
import sys
import tomllib
from collections import Counter
from pathlib import Path

import huggingface_hub
import pytest
import torch
from commands import call
from doc_pages import ROOT, Command, commands, commands_of
from doc_places import RUNS, furnish, furnish_elsewhere, run_of, tiny
from object_store import served
from omegaconf import OmegaConf
from open_hub import accepting

from compiler_trainer.cli import app
from compiler_trainer.cli.table import VERBS
from compiler_trainer.cli.verbs import new
from compiler_trainer.cli.verbs.plan import varied_values
from compiler_trainer.config import schema
from compiler_trainer.config.compose import compose, to_config
from compiler_trainer.config.descriptions import choices_of
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import is_remote
from compiler_trainer.config.jobs import with_files
from compiler_trainer.config.schema import Config, MeshConfig
from compiler_trainer.models.subject import subject
from compiler_trainer.places.hub import is_of_hub
from compiler_trainer.planning.auto import plan_request
from compiler_trainer.planning.dry import dry_run
from compiler_trainer.planning.search import all_forms, room
from compiler_trainer.planning.space import sizes_of
from compiler_trainer.training import status
from compiler_trainer.training.trainer import train

ALL = commands()
LARGE = 8  # number of ranks from which a page means GPUs
GIB = 2**30
RECIPES = choices_of("recipe")


def of_kind(*kinds: str) -> list[Command]:
    """Return the distinct commands of some kinds, from all pages."""
    return list({command.words: command for command in ALL if command.kind in kinds}.values())


def named(command: Command) -> str:
    return f"{command.page}:{command.line}"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Create the folder in which all commands of this file run."""
    folder = tmp_path_factory.mktemp("places")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch, served() as store:
        furnish(folder)
        furnish_elsewhere(folder, store)
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.syspath_prepend(str(folder))
        yield folder


def configs(command: Command) -> list[Config]:
    """Compose the jobs of a command and validate them for the ranks it starts."""
    folder = command.flag("--config-dir")
    overrides = with_files(command.options)
    if folder:
        overrides.append(f"hydra.searchpath=[file://{Path(folder).resolve()}]")
    if command.kind == "plan":
        variants = varied_values([w for before, w in itertools.pairwise(command.words) if before == "--vary"])
        changes = [[f"{name}={value}" for name, value in chosen.items()] for chosen in (variants[0], variants[-1])]
        return [to_config(compose([*overrides, *changed])) for changed in changes[: len(variants)]]
    if command.kind == "sweep":
        return [app.checked(OmegaConf.create(compose(point)), command.ranks) for point in points(overrides)]
    return [app.checked(OmegaConf.create(compose(overrides)), command.ranks)]


def points(overrides: list[str]) -> list[list[str]]:
    """Return the first and the last point of a sweep, without the launcher's options."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    lists = []
    for override in OverridesParser.create().parse_overrides([o for o in overrides if not o.startswith("hydra")]):
        values = ["1e-3"] if override.is_sweep_override() and not override.is_discrete_sweep() else None
        values = values or (list(override.sweep_string_iterator()) if override.is_sweep_override() else None)
        lists.append([f"{override.get_key_element()}={v}" for v in values] if values else [override.input_line])
    every = [list(point) for point in itertools.product(*lists)]
    return [every[0], every[-1]]


# ---- every command has a tested kind -------------------------------------------------------------


def test_each_command_is_of_a_kind_that_is_tested(record_property):
    kinds = Counter(command.kind for command in ALL)
    composed = len(of_kind("job", "plan", "sweep"))
    small, large = len(SMALL), len([c for c in of_kind("job") if is_on_gpus(c)])
    record_property("counted", f"commands of the pages: {sum(kinds.values())} ({dict(kinds.most_common())}); "
                    f"{composed} different ones composed, {large} and {len(PLANS)} plans fit, "
                    f"{small} and {len(VERB_LINES)} verbs run in little")
    assert kinds["job"] > 30 and kinds["verb"] > 30


WRONG = {
    "compiler-trainer optim.lrr=3e-4": "lr",
    "compiler-trainer optim=muon train.steps=many": "train.steps",
    "torchrun --nproc-per-node 8 -m compiler_trainer mesh.dp_shard=4": "ranks",
    "compiler-trainer recipe=llama4_8b": "recipe",
    "compiler-trainer plan model=llama3_8b cluster=h900": "cluster",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_command_that_is_changed_fails(places, line):
    (command,) = commands_of(f"```sh\n{line}\n```", "page.md")
    with pytest.raises(UserError, match=WRONG[line]):
        configs(command)


@pytest.mark.parametrize("line", ["compiler_trainer train.steps=1", "podman run trainer", "sudo make train"])
def test_a_line_that_no_test_knows_fails(line):
    (command,) = commands_of(f"```sh\n{line}\n```", "page.md")
    with pytest.raises(ValueError, match="page.md:2"):
        assert command.kind


def test_commands_are_found_wherever_they_stand():
    text = "Do `make test` now.\n\n    torchrun --nproc-per-node 2 -m compiler_trainer \\\n        a.b=1\n\n```console\n$ compiler-trainer c=2 \\\n    d=3\nout\n```\n"
    commands_found = list(commands_of(text, "page.md"))
    assert [(c.line, c.kind, c.options, c.ranks) for c in commands_found] == [
        (3, "job", ["a.b=1"], 2), (7, "job", ["c=2", "d=3"], 1), (1, "make", [], 1)]


# ---- jobs ----------------------------------------------------------------------------------------


def is_on_gpus(command: Command) -> bool:
    """Return True if the page runs the command on GPUs."""
    named = {option for option in command.options if option.startswith("cluster=")} - {"cluster=cpu"}
    return bool(named) and "run.dry=true" in command.options or command.ranks >= LARGE


@pytest.mark.sample(60)
@pytest.mark.parametrize("command", of_kind("job", "plan", "sweep"), ids=named)
def test_composes(places, command):
    assert configs(command)


def on_h100(cfg: Config, ranks: int) -> Config:
    """Return the job with an H100 cluster unless it names a cluster."""
    h100 = to_config(compose(["cluster=h100"])).cluster
    cluster = cfg.cluster if cfg.cluster.gpus else dataclasses.replace(h100, gpus=ranks)
    return dataclasses.replace(cfg, cluster=cluster)


def ranks_of(command: Command, cfg: Config) -> int:
    return command.ranks if not cfg.run.dry else cfg.cluster.gpus or math.prod(
        size for axis, size in dataclasses.asdict(cfg.mesh).items() if axis != "ep")


def has_stages(command: Command) -> bool:
    """Return True if the command has pipeline stages; closed forms do not cover them, so it must be compiled."""
    return any(option.startswith("mesh.pp=") for option in command.options)


@pytest.mark.parametrize("command", [c for c in of_kind("job") if is_on_gpus(c) and not has_stages(c)], ids=named)
def test_fits_by_closed_forms(places, command):
    (cfg,) = configs(command)
    wanted = plan_request(on_h100(cfg, ranks_of(command, cfg)), ranks_of(command, cfg))
    forms = all_forms(wanted, sizes_of(wanted.cfg, subject(wanted.cfg).module))
    matches = [form for form in forms if agree(cfg.mesh, form.candidate.mesh)]
    least = min((form.bytes for form in matches), default=math.inf)
    assert least <= 1.05 * room(wanted), f"{command}: {least / GIB:.1f} of {room(wanted) / GIB:.1f} GiB"


def agree(stated: MeshConfig, mesh: MeshConfig) -> bool:
    """Return True if a mesh has the stated sizes; -1 matches any size."""
    return all(size in (-1, getattr(mesh, axis)) for axis, size in dataclasses.asdict(stated).items())


@pytest.mark.full
@pytest.mark.sweep(5)
@pytest.mark.parametrize("command", [c for c in of_kind("job") if is_on_gpus(c)], ids=named)
def test_fits_when_compiled(places, tmp_path, command):
    (cfg,) = configs(command)
    cfg = on_h100(cfg, ranks_of(command, cfg))
    cfg = dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, dry=True, dump_graphs=False, dir=str(tmp_path / "dry")))
    from compiler_trainer.planning.auto import choose_automatic

    assert dry_run(choose_automatic(cfg))["prediction"]["memory"]["fits"], str(command)


PLANS = of_kind("plan")


@pytest.mark.full
@pytest.mark.sweep(3)
@pytest.mark.parametrize("command", [c for c in PLANS if c.options], ids=named)
def test_plans(places, tmp_path, command):
    varied = [w for pair in itertools.pairwise(command.words) if pair[0] == "--vary" for w in pair]
    options = [o for o in command.options if not o.startswith("run.dir")]
    if "cluster=h100" in options:
        assert call("plan", *options, *varied, "plan.compile=2", f"run.dir={tmp_path / 'plan'}") == 0


def first_of_each(commands: list[Command], key, always_full: tuple[str, ...] = ()) -> list:
    """Return commands as parameters of a test; `make test` runs the first of a kind that a guide shows."""
    seen, parameters = set(), []
    for command in commands:
        late = key(command) in seen or command.arguments[0] in always_full or "measured/" in named(command)
        seen |= set() if late else {key(command)}
        parameters.append(pytest.param(command, marks=[pytest.mark.full] if late else [], id=named(command)))
    return parameters


# ---- small jobs train ----------------------------------------------------------------------------

SMALL = [c for c in of_kind("job") if not is_on_gpus(c) and c.ranks == 1 and not {"--cfg", "--config-dir"} & set(c.words)]


def first_group(command: Command) -> str:
    """Return the group of a job's first option, or its full text if it chooses a model or a recipe."""
    first = next(iter(command.options), "")
    return first if first.startswith(("model=", "recipe=")) else first.partition("=")[0].partition(".")[0]


@pytest.mark.sample(6)
@pytest.mark.parametrize("command", first_of_each(SMALL, first_group))
def test_trains_in_little(places, tmp_path, command):
    (cfg,) = configs(command)
    assert math.isfinite(train(tiny(cfg, tmp_path / "run")))
    assert (tmp_path / "run/metrics.jsonl").read_text().count("\n") == 4


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.sample(3)
def test_the_job_file_of_each_recipe_is_the_recipe_and_trains_in_little(places, tmp_path, recipe, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("hub", "chats.jsonl", "pairs.jsonl", "reviews.jsonl", "prompts.jsonl", "queries.jsonl", "answers.jsonl", "books"):
        (tmp_path / name).symlink_to(places / name)
    shutil.copytree(places / "qwen", "FOLDER")
    shutil.copytree(places / "teacher", "Qwen/Qwen3-8B")
    assert call("new", recipe) == 0
    Path("job.yaml").write_text(text := capsys.readouterr().out)
    assert all("#" in line or line.endswith(":") or line == f"recipe: {recipe}" for line in text.splitlines())
    cfg, model = to_config(compose(["job.yaml"])), ["model=llama3_8b"] if recipe == "pretrain" else []
    assert undated(cfg) == undated(to_config(compose([f"recipe={recipe}", *model, *new.placeholders(recipe)])))
    if recipe != "windowed_50m":  # it has one size
        assert math.isfinite(train(tiny(cfg, tmp_path / "run")))


def test_the_config_of_a_run_trains_the_same_job_in_another_folder(places, tmp_path):
    assert call(run_of("decoder") / "config.yaml", f"run.dir={tmp_path}/again") == 0
    first, again = ([json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (run_of("decoder"), tmp_path / "again"))
    assert first == again and len(first) == 4


def undated(cfg: Config) -> Config:
    """Return a job with a run folder that does not depend on the time."""
    return dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, dir=""))


def test_a_choice_of_ones_own_is_what_its_file_says(places):
    (command,) = [c for c in of_kind("job") if "model=reader" in c.options]
    (cfg,) = configs(command)
    assert cfg.model == {"_target_": "my_package.Reader", "width": 128}


@pytest.mark.full
def test_every_export_loads_as_its_page_says(places, capsys):
    for run, *words in (("tuned", "tuned"), ("lora", "merged", "--merge"), ("lora", "adapter"), ("reward", "scorer"), ("classes", "classifier")):
        assert call("export", run_of(run), *words) == 0
    page = (ROOT / "docs/guides/finetune.md").read_text()
    chat, merged, adapter, *others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for name, printed in (("scorer", r"tensor\(\[\[-?\d"), ("classifier", r"'label': '(nega|posi)tive'")):
        (block,) = (block for block in others if f'"{name}"' in block)
        exec(block, {})
        assert re.search(printed, capsys.readouterr().out)
    exec(chat, {})
    assert capsys.readouterr().out.endswith("\n")
    logits = []
    for block in (merged, adapter):
        exec(block, names := {})
        ids = names["tokenizer"].apply_chat_template([{"role": "user", "content": "hi"}], return_tensors="pt", return_dict=True)
        logits.append(names["model"].eval()(**ids).logits)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


# ---- verbs ---------------------------------------------------------------------------------------

VERB_LINES = [c for c in of_kind("verb") if c.arguments[1:] and c.arguments[0] not in ("calibrate", "doctor", "sweep")]


def use_of(command: Command) -> tuple[str, ...]:
    """Return a verb with its flags, the kind of place that it writes to, and "True" if options follow."""
    words = command.arguments
    places = [kind for word in words for kind in ("://", "hub:", ".gguf") if kind in word]
    return (words[0], *(w for w in words if w.startswith("--")), *places, str(any("=" in w for w in words)))


def pretend_to_run(run: Path) -> None:
    """Make a run look like an elastic job that trains, whose launcher answers."""
    cfg = schema.load(run / "config.yaml")
    schema.save(dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, elastic=True)), run / "config.yaml")
    LAUNCHERS.append(store := torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    (run / status.FILE).write_text(json.dumps({status.LAUNCHER: f"127.0.0.1:{store.port}"}))


LAUNCHERS: list[torch.distributed.TCPStore] = []


def arguments_of(command: Command, tmp_path: Path) -> list[str]:
    """Return the arguments of a verb, with small runs and with files in this test's folder."""
    words, verb = list(command.arguments), command.arguments[0]
    for i, word in enumerate(words[1:], 1):
        if word in RUNS:
            run = tmp_path / word.replace("/", "_")
            kind = "dry" if verb == "inspect" and word == "RUN" else RUNS[word]
            shutil.copytree(run_of(kind), run, dirs_exist_ok=True)
            words[i] = str(run)
            if verb == "resize":
                pretend_to_run(run)
        elif word.startswith("train.steps="):
            words[i] = "train.steps=5"
        elif verb == "compile" and word == "cluster=h100":
            words[i] = "cluster=cpu"  # otherwise a library is built first
        elif verb == "check-export" and i == 2:
            words[i] = str(tmp_path / word)
            assert call("export", words[1], words[i], *(word for word in words if word == "--ema")) == 0
        elif word == "RECIPE":
            words[i] = "lora"
        elif word in ("fold_scales", "tanh_gelu"):  # the pages ask their readers to write these passes
            words[i] = "simplify"
        elif verb == "export" and i == 2 and not is_remote(word) and not is_of_hub(word) or words[i - 1] == "--out" and verb == "compile":
            words[i] = str(tmp_path / word)
    if verb == "compile":
        words += "model.dim=64 model.n_layers=1 model.n_heads=2 model.n_kv_heads=2 model.ffn_dim=64 train.seq_len=64".split()
    return [w for w in words if not w.startswith("run.dir=")]


@pytest.mark.sample(6)
@pytest.mark.parametrize("command", first_of_each(VERB_LINES, use_of, always_full=("bisect", "check-export")))
def test_does_what_the_verb_says(places, tmp_path, command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    accepting(monkeypatch)
    assert command.arguments[0] in VERBS, str(command)
    arguments = arguments_of(command, tmp_path)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = call(*arguments)
    assert code == 0, f"{command}: {shlex.join(arguments)}: {output.getvalue()[-2000:]}"


def test_verbs_that_are_only_named_are_there():
    for command in of_kind("verb"):
        assert command.arguments[0] in VERBS or command.words[0] == "torchrun", str(command)


@pytest.mark.parametrize("command", of_kind("--help"), ids=named)
def test_help_knows_the_word(command, capsys):
    assert call(*command.arguments) == 0 and capsys.readouterr().out


# ---- commands of other programs ------------------------------------------------------------------

STARTERS = ("tools.gpu_day.ranks",)

@pytest.mark.parametrize("command", of_kind("tool"), ids=named)
def test_tools_take_these_flags(command):
    if command.words[2] in STARTERS:  # the started command has its own flags
        verb = next(word for word in command.words if word in VERBS)
        assert flags_of_tool(f"compiler_trainer.cli.verbs.{verb}") >= flags_in(command), str(command)
        return
    assert flags_of_tool(command.words[2]) >= flags_in(command), str(command)
    if options := [option for option in command.options if option != command.flag("--case")]:
        compose(options)


def flags_in(command: Command) -> set[str]:
    return {word for word in command.words[3:] if word.startswith("--")}


def flags_of_tool(module: str) -> set[str]:
    """Return the flags that a tool's source declares."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    path = Path(spec.origin)
    files = path.parent.glob("*.py") if path.name == "__init__.py" else [path]
    return set(re.findall(r'"(--[a-z-]+)"', "".join(file.read_text() for file in files)))


@pytest.mark.parametrize("command", of_kind("make"), ids=named)
def test_targets_are_in_the_makefile(command):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command.words[1] in targets, str(command)


@pytest.mark.parametrize("command", of_kind("pip"), ids=named)
def test_extras_are_in_pyproject(command):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    groups = re.findall(r"(?:\.|compiler-trainer)\[([a-z,]+)\]", " ".join(command.words))
    assert {extra for group in groups for extra in group.split(",")} <= set(extras), str(command)


@pytest.mark.parametrize("command", of_kind("pytest"), ids=named)
def test_test_files_are_there(command):
    reader_file = "tests/passes/autograd/test_fold_scales.py"  # the page asks its reader to write it
    for word in command.words:
        assert not word.startswith("tests/") or word == reader_file or (ROOT / word).exists(), str(command)
