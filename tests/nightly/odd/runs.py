"""Run commands on damaged run folders: each must pass the damage over or be refused in one line."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.nightly.odd.cases import DECODER, SMALL
from tests.nightly.odd.damage import Damage, damages, damages_of_any_file, folders, removals
from tests.nightly.odd.trial import FALLBACK, Outcome, run_command

CONFIG, METRICS, REPORT = "config.yaml", "metrics.jsonl", "report.json"
NEWEST = "checkpoints/step_00000002"
INDEX, PIECES = f"{NEWEST}/index.json", f"{NEWEST}/rank_00000.safetensors"
GRAPHS = ("graphs/00_forward_capture.txt", "graphs/00_forward_capture.json", "graphs/09_forward_shard.json",
          *(f"graphs/19_step_overlap.{ending}" for ending in ("txt", "costs.json", "graph.json")))  # fmt: skip
AT_LEAST = {METRICS: ("missing", "empty", "cut"), REPORT: ("no keys", "other keys"),
            NEWEST: ("all renamed",)}  # enough is left to use
TO_TOOLS = {CONFIG: ("no keys", "other keys", "cut", "itself", "numbers as names")}  # these commands show partial data
LOOKS = ("bisect", "inspect", "diff")
READ_TOKENS = ("resume", "eval")
HARMLESS = ("a file more",)  # to all commands but check


class Verb(NamedTuple):
    """A command on the folder `run`, and the files it needs; `falls_back`: it can use the previous checkpoint."""

    arguments: tuple[str, ...]
    needs: tuple[str, ...]
    falls_back: bool = False


STORED = (NEWEST, INDEX, PIECES)
NAMED = f"checkpoint.resume=run/{NEWEST}"
SHOWN = (CONFIG, METRICS, REPORT)
VERBS = (
    Verb(("resume", "run", "train.steps=3"), (CONFIG, METRICS, *STORED), True),
    Verb(("eval", "run", "eval.batches=1"), (CONFIG, *STORED), True),
    Verb(("generate", "run", "--tokens=2"), (CONFIG, *STORED), True),
    Verb(("export", "run", "out"), (CONFIG, *STORED), True),
    Verb(("check", "run"), STORED),
    Verb(("check", f"run/{NEWEST}"), STORED),
    Verb(("resume", "run", "train.steps=3", NAMED), (CONFIG, METRICS, *STORED)),
    Verb((*SMALL, *DECODER, "train.steps=3", "checkpoint.resume=auto"), (METRICS, *STORED), True),
    Verb((*SMALL, *DECODER, "train.steps=3", "checkpoint.resume=latest"), (METRICS, *STORED), True),
    Verb((*SMALL, *DECODER, "train.steps=3", "run.dir=new", NAMED), STORED),
    Verb(("bisect", "run", NAMED, "train.steps=3"), (CONFIG, *STORED)),
    Verb(("inspect", "run",), SHOWN),
    Verb(("inspect", "run", "--html"), (*SHOWN, *GRAPHS)),
    Verb(("inspect", "run", "--parameter", "*wq*"), SHOWN),
    Verb(("diff", "run", "whole"), SHOWN),
)  # fmt: skip


class Trial(NamedTuple):
    """A damaged file of a run, and the command to run on it."""

    file: str
    damage: Damage
    verb: Verb

    def __str__(self) -> str:
        return f"{self.file}: {self.damage.name}: {' '.join(self.verb.arguments)}"


def train_run(folder: Path) -> Path:
    """Train a run of two steps with a checkpoint after each; its token cache lies next to it."""
    outcome = run_command((*SMALL, *DECODER, "checkpoint.interval=1", "data.cache=cache"), folder)
    if outcome.code != 0:
        raise RuntimeError(f"the run to damage cannot be trained: {outcome.stderr}")
    return folder / "run"


def trials(count: int, run: Path, draw: random.Random) -> Iterator[Trial]:
    """Yield `count` damages, evenly over the files, mostly with a command that needs the file."""
    files = {path: [*damages(run / path, draw)] for path in (CONFIG, METRICS, REPORT, INDEX, PIECES, *GRAPHS)}
    files |= {f"../{path.relative_to(run.parent)}": [*damages_of_any_file()] for path in sorted((run.parent / "cache").glob("*/*.*"))}
    files[NEWEST] = [*folders()]
    files["graphs"] = files["."] = [*removals()]
    remaining: dict[str, list[Damage]] = {path: [] for path in files}
    for number in range(count):
        path = [*files][number % len(files)]
        if not remaining[path]:
            remaining[path] = draw.sample(files[path], len(files[path]))
        damage = remaining[path].pop()
        readers = [verb for verb in VERBS if path in verb.needs or "cache" in path and verb.arguments[0] in READ_TOKENS]
        fit = [verb for verb in readers if verb.arguments[0] != "bisect" or damage.is_total]
        yield Trial(path, damage, draw.choice(fit if fit and draw.random() < 0.8 else VERBS[:-5]))


def run_damaged(trial: Trial, run: Path, folder: Path) -> Outcome:
    """Damage a copy of the run and return the outcome of the command on it."""
    for name in ("run", "cache"):
        shutil.copytree(run.parent / name, folder / name)
    (folder / "whole").symlink_to(run)
    trial.damage.act(folder / "run" / trial.file)
    outcome = run_command(trial.verb.arguments, folder)
    return outcome._replace(wrong="runs code from a file" if (folder / "RAN").exists() else find_fault_in_trial(trial, outcome))


def find_fault_in_trial(trial: Trial, outcome: Outcome) -> str:
    """Return the fault in a command's ending, or ""."""
    if outcome.code == 1 and not outcome.stderr and trial.verb.arguments[0] in ("diff", "bisect"):
        return ""  # the exit code 1 means: something differs
    verb = trial.verb.arguments[0]
    serves = (*AT_LEAST.get(trial.file, ()), *(TO_TOOLS.get(trial.file, ()) if verb in LOOKS else ()))
    serves = (*serves, *(HARMLESS if verb != "check" else ()))
    is_needed = trial.file in trial.verb.needs and trial.damage.name not in serves
    if outcome.wrong or outcome.code != 0 or not trial.damage.is_total or not is_needed:
        return outcome.wrong
    if trial.file in STORED and trial.verb.falls_back:
        return "" if FALLBACK in outcome.stderr else "continues silently"
    return "accepts the damage"
