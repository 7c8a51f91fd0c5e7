"""The command: options train a model; a verb does something with a run that there is."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console

from compiler_trainer import train
from compiler_trainer.checkpoint import check_all
from compiler_trainer.config import recipes
from compiler_trainer.config.errors import RunError, UserError
from compiler_trainer.config.meaning import explain
from compiler_trainer.config.schema import MeshConfig
from compiler_trainer.config.yamls import check_folders
from compiler_trainer.data.tokenizers import build_tokenizer
from compiler_trainer.planning.plan import Question, plan, plan_all
from compiler_trainer.trained import saved
from compiler_trainer.trained.evaluate import evaluate
from compiler_trainer.trained.export import export
from compiler_trainer.trained.generate import tokens_after
from compiler_trainer.trained.saved import going_on, options_of, trained_model
from compiler_trainer.training.trainer import train as train_config

USAGE = """usage: compiler-trainer [OPTION=VALUE ...]        train; --cfg job prints the options, -m sweeps over lists
       compiler-trainer VERB RUN [...]           do something with a run folder; VERB -h tells what it takes
       compiler-trainer plan [OPTION=VALUE ...]  find how to run a job on a cluster; trains nothing
       compiler-trainer --help [GROUP or OPTION] what options mean, e.g. --help optim; all groups: --help options
       compiler-trainer --version

verbs: """
OTHER_TEXT = ("data.files", "data.sources", "data.path", "data.split")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    """Do what the command line says; exits with 0 when done, 2 on bad input, 1 on anything else."""
    try:
        act()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)  # taking apart what was imported would take Python more than a second


def act() -> None:
    """Train, or do what the first argument names."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first == "--version":
        print(f"compiler-trainer {importlib.metadata.version('compiler-trainer')}, torch {torch.__version__}")
    elif first in ("-h", "--help") and len(sys.argv) > 2:
        try:
            explain("" if sys.argv[2] == "options" else sys.argv[2], Console(highlight=False))
        except UserError as error:
            train.refuse(error)
    elif first in ("-h", "--help"):
        print(USAGE + "\n       ".join(f"{verb:9} {do.__doc__}" for verb, do in VERBS.items()))
    elif first in VERBS:
        train.store_defaults()
        try:
            VERBS[first](sys.argv[2:])
        except train.INPUT_ERRORS as error:
            train.refuse(error)
        except RunError as error:
            train.end(error)
    else:
        train.main()


def checking(arguments: Sequence[str]) -> None:
    """Read every byte of the checkpoints in a folder; exits with 2 where one is not what was written."""
    takes = argparse.ArgumentParser("compiler-trainer check", description=VERBS["check"].__doc__)
    takes.add_argument("folder", type=Path, help="a run folder, a folder of checkpoints, or a checkpoint")
    damaged = False
    for path, said, is_whole in check_all(takes.parse_args(arguments).folder):
        print(f"{path}: {'whole' if is_whole else 'damaged'}, {said}", flush=True)
        damaged = damaged or not is_whole
    if damaged:
        sys.exit(2)


def parser(verb: str, overrides: bool = False) -> argparse.ArgumentParser:
    """What every verb takes: a run folder, and some of them options to give anew."""
    found = argparse.ArgumentParser(f"compiler-trainer {verb}", description=VERBS[verb].__doc__)
    found.add_argument("run", type=Path, help="the run folder")
    if overrides:
        found.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="options that change")
    return found


def resume(arguments: Sequence[str]) -> None:
    """Go on from the newest checkpoint, or anew where there is none yet, up to train.steps."""
    given = parser("resume", overrides=True).parse_args(arguments)
    train_config(going_on(options_of(given.run, given.overrides, train.CONF), "auto"))


def evaluation(arguments: Sequence[str]) -> None:
    """Loss and perplexity on what the run held out, or on all of the text that data=... names."""
    given = parser("eval", overrides=True).parse_args(arguments)
    cfg = options_of(given.run, given.overrides, train.CONF)
    names = [override.lstrip("+").partition("=")[0] for override in given.overrides]
    if not any(name.startswith("mesh.") for name in names):
        cfg = dataclasses.replace(cfg, mesh=MeshConfig())
    anew = any(name == "data" or name.startswith(OTHER_TEXT) for name in names)
    result = evaluate(cfg, anew, cfg.eval.batches if "eval.batches" in names else None)
    if train.RANK == 0:
        print(", ".join(f"{name} {value:{',' if name == 'tokens' else '.6g'}}" for name, value in result.items()))


def exporting(arguments: Sequence[str]) -> None:
    """Write the newest checkpoint as a folder that transformers, peft or safetensors load."""
    takes = parser("export")
    takes.add_argument("out", type=Path, help="the folder to write")
    takes.add_argument("--dtype", choices=DTYPES, help="of its numbers; by default train.dtype")
    takes.add_argument("--merge", action="store_true", help="add the terms of model.lora to the weights")
    given = takes.parse_args(arguments)
    cfg = options_of(given.run, [], train.CONF)
    print(f"{given.out}: {export(cfg, given.out, DTYPES.get(given.dtype), given.merge)}")


def generation(arguments: Sequence[str]) -> None:
    """Print a prompt and what the model goes on with."""
    takes = parser("generate")
    takes.add_argument("--prompt", default="", help="where the text begins")
    takes.add_argument("--tokens", type=int, default=200, help="most tokens to add (default 200)")
    takes.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    takes.add_argument("--top-k", type=int, help="draw of so many likeliest tokens only")
    takes.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    given = takes.parse_args(arguments)
    if given.tokens < 1 or given.temperature < 0 or (given.top_k is not None and given.top_k < 1):
        raise UserError("generate", "--tokens and --top-k must be at least 1, --temperature 0 or more")
    cfg = options_of(given.run, [], train.CONF)
    tokenizer = build_tokenizer(cfg.data.tokenizer)
    found, model = trained_model(cfg)
    prompt = [int(i) for ids in tokenizer.encode([given.prompt]) for i in ids] or [tokenizer.end_of_document]
    draws = torch.Generator().manual_seed(given.seed)
    how = (cfg.train.seq_len, given.temperature, given.top_k, draws)
    drawn = itertools.islice(tokens_after(model, found.logits, prompt, *how), given.tokens)
    ids = list(itertools.takewhile(lambda i: i != tokenizer.end_of_document, drawn))
    print(given.prompt + tokenizer.decode(ids))


def planning(arguments: Sequence[str]) -> None:
    """Find the fastest mesh, microbatches and recomputation for a model on a cluster, and write a recipe of it."""
    takes = argparse.ArgumentParser("compiler-trainer plan", description=VERBS["plan"].__doc__)
    takes.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="the job; what is stated is kept")
    takes.add_argument("--vary", action="append", default=[], metavar="OPTION=V1,V2", help="plan for each value")
    takes.add_argument("--config-dir", type=Path, help="a folder of choices of one's own")
    given = takes.parse_intermixed_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        overrides = recipes.by_name(given.overrides, Path(scratch))
        if given.config_dir is not None:
            check_folders([str(flag) for flag in ("--config-dir", given.config_dir)])
            overrides.append(f"hydra.searchpath=[file://{given.config_dir.resolve()},file://{scratch}]")
        questions = [question(overrides, given.overrides, values) for values in varied_values(given.vary)]
    if given.vary:
        plan_all(questions)
    else:
        plan(questions[0])


def question(overrides: Sequence[str], stated: Sequence[str], values: dict[str, Any]) -> Question:
    """What to plan for: the default job with overrides, and some values otherwise."""
    changed = [f"{name}={value}" for name, value in values.items()]
    options = saved.compose(train.CONF, [*overrides, *changed])
    groups = frozenset(path.name for path in train.CONF.iterdir() if path.is_dir())
    return Question(train.typed(options), [*stated, *changed], groups, values)


def varied_values(given: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of the values of `--vary`; raises UserError where one has no list of them."""
    lists: list[list[tuple[str, Any]]] = []
    parser = OverridesParser.create()
    for one in parser.parse_overrides(list(given)):
        if not one.is_discrete_sweep():
            raise UserError("--vary", f"{one.input_line} is one value; give several, as train.seq_len=8192,32768")
        name = one.get_key_element().lstrip("+")
        texts = [f"{name}={text}" for text in one.sweep_string_iterator()]
        lists.append([(name, value.value()) for value in parser.parse_overrides(texts)])
    return [dict(values) for values in itertools.product(*lists)]


VERBS: dict[str, Callable[[Sequence[str]], None]] = {
    "plan": planning,
    "resume": resume,
    "eval": evaluation,
    "export": exporting,
    "generate": generation,
    "check": checking,
}

if __name__ == "__main__":
    main()
