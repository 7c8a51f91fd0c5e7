"""The command's verbs are listed, found and refused."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import call

from compiler_trainer.cli import command, table, verbs
from compiler_trainer.runs import ahead

FILES = {path.stem.replace("_", "-") for path in Path(verbs.__path__[0]).glob("*.py") if path.stem != "__init__"}


def test_every_verb_is_a_file_and_listed_under_its_task(capsys):
    assert set(table.VERBS) == FILES
    assert all(callable(importlib.import_module(f"{verbs.__name__}.{name.replace('-', '_')}").main) for name in table.VERBS)
    call("--help")
    shown = capsys.readouterr().out
    places = [shown.index(f"\n{title}:") for title in table.TASKS.values()]
    assert places == sorted(places)
    for name, verb in table.VERBS.items():
        section = shown[shown.index(f"\n{table.TASKS[verb.task]}:") :]
        assert re.search(rf"\n  {re.escape(f'{name} {verb.takes}')}\s", section.partition("\n\n")[0])
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("verb", sorted(table.VERBS))
def test_a_verb_says_what_it_takes(verb, capsys):
    assert call(verb, "-h") == 0
    assert capsys.readouterr().out.startswith(f"usage: compiler-trainer {verb} ")


@pytest.mark.parametrize(("word", "message"), [
    ("train", "error: train: is not a verb: options or a job file alone train, as compiler-trainer job.yaml\n"),
    ("inspekt", "error: inspekt: no such verb; did you mean 'inspect'?\n"),
    ("sft", "error: sft: supervised fine-tuning (SFT) is recipe=finetune, with LoRA recipe=lora\n"),
    ("train.steps", "error: train.steps: has no value; write train.steps=VALUE, without spaces\n"),
])
def test_a_word_that_is_no_verb_gets_one_line(word, message, capsys):
    assert call(word, "optim.lr=1e-4") == 2
    assert capsys.readouterr() == ("", message)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_and_version_import_neither_torch_nor_hydra(arguments):
    script = "import sys; from compiler_trainer.cli.command import act; act(sys.argv[1:]); print(sorted({'torch', 'hydra', 'rich', 'numpy'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.stdout.endswith("\n[]\n"), done.stderr


@pytest.mark.parametrize("option", ["optm.lr=1", "optim.lr=often", "optim=lion", "mesh.dp_shard=8", "--lr=1", "job.yaml"])
def test_options_are_refused_without_importing_torch(option, tmp_path):
    """PyTorch takes most of the time to the message."""
    script = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); from compiler_trainer.cli.command import main; main()"
    (tmp_path / "job.yaml").write_text("train: {stepz: 3}")
    arguments = [option] if isinstance(option, str) else option
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "False\n") and done.stderr.startswith("error: "), done.stderr


@pytest.mark.parametrize("arguments", [
    ["plan", "optm.lr=1", "cluster.gpus=8"], ["plan", "mesh.tp=2", "--vary", "train.seq_len=1,2", "job.yaml"],
    ["compile", "--out", "programs=1", "optim=lion"], ["compile", "--out=programs", "optim=lion"],
    ["plan", "--vary=train.seq_len=1,2", "optim=lion"], ["plan", "--config-dir=.", "optim=lion"],
])  # fmt: skip
def test_verbs_refuse_options_without_importing_torch(arguments, tmp_path):
    test_options_are_refused_without_importing_torch(arguments, tmp_path)


@pytest.mark.parametrize("out", [["--out=programs"], ["--out", "programs"]])
def test_a_flag_with_its_value_leaves_the_next_option(out, monkeypatch):
    compiled = []
    monkeypatch.setattr(ahead, "compile_ahead", lambda cfg, out, tell: compiled.append((cfg, out)))
    assert call("compile", *out, "model.path=folder", "model=hf", "data=text", "data.files=[a.jsonl]") == 0
    [(cfg, folder)] = compiled
    assert (cfg.model.path, cfg.data.files, folder) == ("folder", ("a.jsonl",), Path("programs"))


def test_a_process_that_tokenizes_imports_no_torch_and_no_pass():
    script = "import sys, compiler_trainer.data.worker; print(sorted(m for m in sys.modules if m.partition('.')[0] in ('passes', 'torch')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    words = ["passes", "passes.memory", "passes.memory.policies", "passes.precision", "passes.precision.sensitive"]
    assert done.stdout == f"{words}\n"  # names of policies and operators, for options


def test_a_process_that_writes_conversations_imports_no_torch():
    script = "import sys; from compiler_trainer.data.chat import renderer; renderer(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_warning_of_ours_is_a_line_and_others_name_their_line(monkeypatch):
    monkeypatch.setattr(command.warnings, "formatwarning", command.USUAL)
    call("--version")
    of_ours = command.warnings.formatwarning(UserWarning("it is built again"), UserWarning, command.__file__, 1)
    assert of_ours == "warning: it is built again\n"
    assert command.warnings.formatwarning("old", FutureWarning, "/usr/model.py", 7, "f()").startswith("/usr/model.py:7: FutureWarning: old")


@pytest.mark.parametrize(("environment", "spins"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)])
def test_waiting_threads_give_up_their_core_unless_the_user_says_otherwise(environment, spins, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command.sys, "argv", ["compiler-trainer", "--version"])
    monkeypatch.setattr(command.warnings, "formatwarning", command.USUAL)
    command.main()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
    os.environ.pop("GOMP_SPINCOUNT", None)
