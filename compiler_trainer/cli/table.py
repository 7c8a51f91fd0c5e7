"""The verbs of the command, by task. Each is a file in `verbs/` with a `main`; `-` in its name is `_`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from compiler_trainer.config.errors import UserError


class Verb(NamedTuple):
    """A verb: its task, its arguments, and a description."""

    task: str
    takes: str
    does: str


VERBS = {
    "doctor": Verb("begin", "[--ranks N]", "describe this machine, and try each feature on it"),
    "launch": Verb("train", "[-n RANKS] ...", "start several ranks, as torchrun does, without its tracebacks"),
    "resize": Verb("train", "RUN mesh.AXIS=SIZE", "give a running job of run.elastic=true another mesh"),
    "resume": Verb("train", "RUN [OPTION=VALUE]", "continue a run from its newest checkpoint"),
    "new": Verb("begin", "RECIPE", "print a job file to start from, with comments"),
    "check-data": Verb(
        "begin", "FILE [OPTION=VALUE]", "print a record as the model will see it: tokens, labels, unused fields"
    ),
    "tokenize": Verb("train", "--out DIR [OPTION=VALUE]", "tokenize a job's data ahead of time"),
    "compile": Verb(
        "train", "--out DIR [OPTION=VALUE]", "compile the programs of a job ahead of time, without its GPUs"
    ),
    "plan": Verb("plan", "[OPTION=VALUE]", "find the fastest mesh, microbatches and recomputation for a cluster"),
    "calibrate": Verb("plan", "--out FILE", "measure this machine, and write it as a cluster to predict for"),
    "inspect": Verb("look", "RUN [--html]", "show what each pass did to the graph, in the terminal or as a page"),
    "profile": Verb("look", "RUN | [OPTION=VALUE]", "where a step's time goes, next to its prediction; what to change"),
    "diff": Verb("look", "RUN RUN", "show what differs between two runs: options, graphs, metrics"),
    "bisect": Verb("look", "[RUN] [OPTION=VALUE]", "find the pass and graph node where results go wrong"),
    "check-model": Verb("look", "[CLASS] [OPTION=VALUE]", "compare a model's training on a mesh with eager PyTorch's"),
    "sweep": Verb("look", "DIR", "write the table and plots of a sweep again"),
    "generate": Verb("use", "RUN [--chat] --prompt TEXT", "sample text from the model, or its answer in a chat"),
    "chat": Verb("use", "RUN|MODEL", "talk to the model of a run, or to one of a folder or the hub"),
    "eval": Verb("use", "RUN [OPTION=VALUE]", "loss and perplexity on validation or other text"),
    "export": Verb("use", "RUN OUT", "write a checkpoint for transformers, peft or safetensors, or as a GGUF file"),
    "check-export": Verb("use", "RUN OUT", "compare transformers' log-probabilities of an export with the trainer's"),
    "clean": Verb("keep", "[--gib GIB]", "delete the least recently used entries of the compile cache"),
    "check": Verb("keep", "FOLDER", "read every byte of the checkpoints in a folder, and say which are damaged"),
}
TASKS = {
    "begin": "Begin",
    "train": "Train",
    "plan": "Plan and predict",
    "look": "Look into runs",
    "use": "Use a trained model",
    "keep": "Keep checkpoints and caches",
}


def usage() -> str:
    """Return the text of `compiler-trainer --help`."""
    lines = [
        "usage: compiler-trainer [JOB.yaml] [OPTION=VALUE ...]   train a model",
        "       compiler-trainer VERB ...                        VERB -h: its arguments",
    ]
    for task, title in TASKS.items():
        lines += ["", f"{title}:"]
        rows = {f"{name} {verb.takes}": verb.does for name, verb in VERBS.items() if verb.task == task}
        lines += rows_of({**START, **rows} if task == "train" else rows)
    return "\n".join([*lines, "", "Options:", *rows_of(FLAGS)])


def rows_of(texts: Mapping[str, str]) -> Iterator[str]:
    """Yield usages and what they do, in two columns of a terminal of 80 characters."""
    for usage, does in texts.items():
        first, *more = textwrap.wrap(does, 80 - COLUMN)
        if len(usage) > COLUMN - 4:
            yield f"  {usage}"
            usage = ""
        yield f"  {usage:{COLUMN - 2}}{first}"
        yield from (" " * COLUMN + line for line in more)


COLUMN = 32  # where the second column begins
START = {
    "OPTION=VALUE ...": "train; options left out keep their defaults",
    "JOB.yaml ...": "train with the options of a file; all verbs with options take one",
}
FLAGS = {
    "--help [WORD]": "describe options: a group (optim), an option (optim.lr), a value or any word; all: --help "
    "options; recipes: --help recipe",
    "--cfg job": "print every option of the job, and train nothing",
    "-m, --multirun": "sweep: train once for each combination of OPTION=A,B",
    "--config-dir DIR": "a folder of your own choices, laid out like conf/",
    "--version": "versions of compiler-trainer and PyTorch",
}


class VerbParser(argparse.ArgumentParser):
    """A parser that refuses arguments in one line: an unknown flag is often an option of this or another trainer."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with argparse's message, and the answer for an unknown flag."""
        from compiler_trainer.config.compose import no_flag

        flag, is_option, value = message.removeprefix(UNKNOWN).partition(" ")[0].partition("=")
        if message.startswith(f"{UNKNOWN}--"):
            raise UserError(f"{flag}{is_option}{value}", no_flag(flag.lstrip("-"), value))
        raise UserError(self.prog, f"{message}; {self.prog} --help describes them")


UNKNOWN = "unrecognized arguments: "


def parser(verb: str) -> VerbParser:
    """Return a parser for the arguments of a verb."""
    does = VERBS[verb].does
    return VerbParser(f"compiler-trainer {verb}", description=f"{does[0].upper()}{does[1:]}.")


CHECKPOINT = "checkpoint to read: the lowest validation loss, the newest (default), or a folder"


def run_parser(verb: str, overrides: bool = False, of: type = Path) -> VerbParser:
    """Return a parser for a verb on a run folder, with `--checkpoint`, and with overrides of options if wanted.

    The folder is an instance of `of`; a Path would change s3://bucket/model.
    """
    arg_parser = parser(verb)
    arg_parser.add_argument("run", type=of, metavar="RUN", help="the run folder")
    arg_parser.add_argument("--checkpoint", metavar="best|latest|PATH", help=CHECKPOINT)
    if overrides:
        arg_parser.add_argument("overrides", nargs="*", default=[], metavar="OPTION=VALUE", help="options that change")
    return arg_parser
