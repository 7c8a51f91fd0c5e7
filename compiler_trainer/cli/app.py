"""Training from options: hydra composes them, `config` checks them, and each job is trained, maybe as a sweep."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from compiler_trainer.cli.ends import end, is_first, ranks, record, refuse
from compiler_trainer.cli.extras import not_installed
from compiler_trainer.cli.outcome import outcome
from compiler_trainer.config.compose import (
    as_user_errors,
    compose,
    no_flag,
    search_path,
    store_defaults,
    to_config,
)
from compiler_trainer.config.errors import RunError, UserError
from compiler_trainer.config.files import CONF, check_folder
from compiler_trainer.config.jobs import with_files
from compiler_trainer.config.schema import Config, as_yaml, is_open, with_placeholders
from compiler_trainer.config.validate import dry_world_size, validate


def main() -> None:
    """Train the job of the command line.

    Raises UserError for bad input; exits with 1 on any other error.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise hydra prints its errors and exits with 1
    store_defaults()
    flags, options = split_flags(sys.argv[1:])
    if (what := flags.get("--cfg")) is not None:
        return show_job(what, options, flags.get("--config-dir"))
    sys.argv[1:] = [*(f"{flag}={value}" if value else flag for flag, value in flags.items()), *with_files(options)]
    with tempfile.TemporaryDirectory() as scratch:
        if not is_first():  # hydra creates a sweep's folder on every rank, and names it by the rank's clock
            sys.argv.append(f"hydra.sweep.dir={scratch}")
        try:
            with as_user_errors():
                run()
        except OSError as error:  # in hydra's own folders or in --config-dir
            raise UserError(str(error.filename), str(error.strerror)) from error


SHORT = {"-m": "--multirun", "-c": "--cfg", "-cd": "--config-dir"}
TAKE_VALUES = ("--cfg", "--config-dir")


def split_flags(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the flags with their values, empty for none, and the options; raise UserError for an unknown flag."""
    flags: dict[str, str] = {}
    options: list[str] = []
    words = iter(arguments)
    for word in words:
        name, _, value = word.partition("=")
        name = SHORT.get(name, name)
        if not word.startswith("-"):
            options.append(word)
        elif name in TAKE_VALUES:
            flags[name] = value or next(words, "")
        elif name == "--multirun":
            flags[name] = ""
        else:
            raise UserError(word, no_flag(name.lstrip("-"), value))
    if folder := flags.get("--config-dir"):
        check_folder(Path(folder))
    return flags, options


def show_job(what: str, options: list[str], folder: str | None) -> None:
    """Print all options of a job, as its run folder will have them."""
    if what != "job":
        raise UserError("--cfg", f"shows the job: write --cfg job, not {what!r}; a job file is given by itself")
    print(as_yaml(to_config(compose([*options, *search_path(Path(folder) if folder else None)]))), end="")


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def run(composed: DictConfig) -> float | None:
    """Train one composed config; return its last validation loss, otherwise its last loss. Sweepers minimize it.

    A point of a sweep trains in its own subfolder. Returns None if the point failed, so that the sweep continues.
    """
    try:
        job = HydraConfig.get()
        cfg = checked(composed, ranks_of(job))
        if job.mode == RunMode.MULTIRUN:
            from compiler_trainer.sweep import point

            if cfg.run.elastic:
                raise UserError("run.elastic", "cannot be set in a sweep, whose points share their ranks; leave it out")
            if ranks_of(job) != ranks():
                point.join_tasks()
            return point.run_point(in_subfolder(cfg, str(job.job.num)), job.job.num, job.overrides.task, outcome)
        return outcome(cfg)
    except UserError as error:
        refuse(error)
    except RunError as error:
        end(error)
    except ModuleNotFoundError as error:
        refuse(not_installed(error))
    except Exception as error:  # an exception that leaves this function would be reported as an error in composing
        record(error)
        traceback.print_exc()
        sys.exit(1)


class WatchSweep(Callback):
    """A hydra callback that checks every point of a sweep before the first starts, and renders the sweep at the end."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Exit with 2 if a point is refused."""
        from compiler_trainer.sweep import render  # noqa: F401  # plots need an extra: fail now, not at the end
        from compiler_trainer.sweep.stored import check

        try:
            with as_user_errors():
                for number, point in enumerate(points(config.hydra.overrides.task)):
                    overrides = [*config.hydra.overrides.hydra, *point]
                    cfg = checked(hydra.compose(config.hydra.job.config_name, overrides), ranks_of(config.hydra))
                    if is_first():
                        check(in_subfolder(cfg, str(number)))
        except UserError as error:  # hydra would log an exception and continue
            refuse(error)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Exit with 1 if a point failed."""
        from compiler_trainer.sweep.render import render

        if is_first() and not render(Path(config.run.dir)):
            sys.exit(1)


def points(overrides: list[str]) -> Iterator[tuple[str, ...]]:
    """Return the overrides of each point of a sweep over lists; none for ranges, whose points are chosen later."""
    choices: list[list[str]] = []
    parser = OverridesParser.create(GlobalHydra.instance().config_loader())
    for override in parser.parse_overrides(list(overrides)):
        if not override.is_sweep_override():
            choices.append([str(override.input_line)])
        elif override.is_discrete_sweep():
            choices.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
        else:
            return iter(())
    return itertools.product(*choices)


def ranks_of(job: Any) -> int:
    """Return the ranks of a hydra job: those that torchrun started, times the tasks of a launcher per point."""
    nodes, tasks = (OmegaConf.select(job, f"launcher.{name}", default=1) for name in ("nodes", "tasks_per_node"))
    return ranks() * nodes * tasks


def checked(composed: DictConfig, ranks: int) -> Config:
    """Return the typed config, resolved for a number of ranks; raise UserError."""
    with as_user_errors():
        options = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    cfg = to_config(options)
    if cfg.run.dry and ranks > 1:
        raise UserError("run.dry", f"runs in one process, and {ranks} were started; start it without torchrun")
    if is_open(cfg):  # all other options can be checked before there is a plan
        validate(with_placeholders(cfg), dry_world_size(cfg) if cfg.run.dry else ranks)
        return cfg
    return validate(cfg, dry_world_size(cfg) if cfg.run.dry else ranks)


def in_subfolder(cfg: Config, name: str) -> Config:
    """Return `cfg` with its run folder, and the places of its checkpoints, moved to the subfolder `name`."""
    places = {key: getattr(cfg.checkpoint, key) for key in ("dir", "store")}
    moved: dict[str, Any] = {key: f"{place}/{name}" for key, place in places.items() if place is not None}
    run = dataclasses.replace(cfg.run, dir=str(Path(cfg.run.dir, name)))
    return dataclasses.replace(cfg, run=run, checkpoint=dataclasses.replace(cfg.checkpoint, **moved))
