"""`profile`: show where the time of a step goes, measured next to predicted, and what to change.

compiler-trainer profile RUN                           # a run that was trained with run.profile=true
compiler-trainer profile recipe=llama3_8b ...          # a few steps of a job, with nothing saved
compiler-trainer launch -n 8 profile mesh.dp_shard=8   # on several ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compiler_trainer.cli.ends import is_first
from compiler_trainer.cli.outcome import on_ranks
from compiler_trainer.cli.table import parser
from compiler_trainer.config.compose import compose, search_path, to_config
from compiler_trainer.config.jobs import is_job_file
from compiler_trainer.config.schema import Config
from compiler_trainer.console import say, wide
from compiler_trainer.planning.space import replace_nested
from compiler_trainer.profile.report import FILE, lines, profile, tables, write
from compiler_trainer.runs.saved import options_of
from compiler_trainer.step.ranks import stop_ranks
from compiler_trainer.training.callbacks import Callback, Run
from compiler_trainer.training.metrics import Record
from compiler_trainer.training.trace import STEPS, WARM_UP

QUIET = {  # no checkpoints, no evaluations, and no options that need them
    "checkpoint": {"interval": None, "keep_best": 0, "store": None},
    "eval": {"interval": None, "patience": None, "prompts": ()},
    "run": {"profile": True, "dry": False},
}


def main(arguments: Sequence[str]) -> None:
    """Print a profile, and write it into the run folder."""
    arg_parser = parser("profile")
    arg_parser.add_argument(
        "job", nargs="*", metavar="RUN | OPTION=VALUE", help="a run folder, or the options of a job"
    )
    arg_parser.add_argument("--config-dir", type=Path, help="a folder of your own choices")
    args = arg_parser.parse_intermixed_args(arguments)
    folders = [argument for argument in args.job[:1] if "=" not in argument and not is_job_file(argument)]
    run = Path(folders[0]) if folders else trained(args.job, args.config_dir)
    if is_first():
        tell(options_of(run, args.job[len(folders) :] if folders else []))


def tell(cfg: Config) -> None:
    """Print the profile of a run, and write it."""
    measured, console = profile(cfg), wide(highlight=False, markup=False)
    for table in tables(measured):
        console.print(table)
    for line in lines(measured):
        say(line)
    write(measured, folder := Path(cfg.run.dir))
    say(f"the same in {folder / FILE}")


def trained(overrides: Sequence[str], config_dir: Path | None) -> Path:
    """Run as many steps of a job as a profile needs; return its run folder."""
    cfg = replace_nested(to_config(compose([*overrides, *search_path(config_dir)])), QUIET)
    if cfg.train.nonfinite == "rollback":
        cfg = replace_nested(cfg, {"train": {"nonfinite": "stop"}})
    ends = Ends()
    on_ranks(cfg, [ends])
    stop_ranks()
    return ends.folder


class Ends(Callback):
    """A callback that ends a run after the profiled steps, and keeps its folder."""

    def on_start(self, run: Run) -> None:
        self.folder, self.last = run.folder, run.done + WARM_UP + STEPS

    def on_step(self, run: Run, record: Record) -> None:
        if record["step"] == self.last:
            run.stop("that is enough for a profile")
