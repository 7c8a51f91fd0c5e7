"""The command line: hydra composes the options, `config` checks them, the trainer trains."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from compiler_trainer.config import recipes
from compiler_trainer.config.errors import RunError, UserError
from compiler_trainer.config.options import not_one_of, tables, unknown
from compiler_trainer.config.schema import AUTO, Config, MeshConfig, ModelConfig, build
from compiler_trainer.config.validate import dry_world_size, validate
from compiler_trainer.config.yamls import check_folders
from compiler_trainer.planning.outcome import outcome
from compiler_trainer.sweep.point import join_tasks, run_point
from compiler_trainer.sweep.render import render
from compiler_trainer.sweep.stored import check

CONF = Path(__file__).resolve().parent.parent / "conf"
RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
GRACE_S = 5.0
OWN = "model._target_"
INPUT_ERRORS = (UserError, HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError)  # hydra raises the last


def main() -> None:
    """Train as the command line says; exits with 0 when done, 2 on bad input, 1 on anything else."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra then raises its errors, else it prints them and exits with 1
    store_defaults()
    sys.argv[1:] = flags_first(sys.argv[1:])
    with tempfile.TemporaryDirectory() as scratch:
        if RANK != 0:  # hydra makes a sweep's folder on every rank, and clocks may differ
            sys.argv.append(f"hydra.sweep.dir={scratch}")
        try:
            check_folders(sys.argv[1:])
            sys.argv[1:] = recipes.by_name(sys.argv[1:], Path(scratch))
            run()
        except INPUT_ERRORS as error:
            refuse(error)
        except OSError as error:  # of hydra's own folders and of --config-dir
            refuse(UserError(str(error.filename), str(error.strerror)))


def flags_first(arguments: list[str]) -> list[str]:
    """The arguments with options behind flags and what these take: argparse takes none on both sides of a flag."""
    is_option = [not a.startswith("-") and ("=" in a or a.startswith("~")) for a in arguments]
    flags = [a for a, option in zip(arguments, is_option) if not option]
    return flags + [a for a, option in zip(arguments, is_option) if option]


def store_defaults() -> None:
    """Tell hydra every option with its default; those of a decoder go with `model=decoder`, as its choices do."""
    options, decoder = defaults(), OmegaConf.create(dataclasses.asdict(ModelConfig()))
    OmegaConf.set_struct(decoder, True)
    options.model = {}
    OmegaConf.set_struct(options.model, False)  # a folder, or a module of one's own
    ConfigStore.instance().store(name="options", node=options)
    ConfigStore.instance().store(group="model", name="decoder", node=decoder)


def defaults() -> DictConfig:
    """Every option with its default; a table takes entries of any name."""
    options = OmegaConf.create(dataclasses.asdict(Config()))
    for name in tables(Config()):
        OmegaConf.set_struct(OmegaConf.select(options, name), False)
    return options


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def run(composed: DictConfig) -> float | None:
    """Train one composed config; its last held-out loss, else its last loss, which is what a sweeper minimizes.

    A point of a sweep trains in a subfolder of its own; None if it failed, for then the sweep goes on.
    """
    try:
        job = HydraConfig.get()
        cfg = checked(composed, ranks_of(job))
        if job.mode == RunMode.MULTIRUN:
            if ranks_of(job) != WORLD_SIZE:
                join_tasks()
            return run_point(in_subfolder(cfg, str(job.job.num)), job.job.num, job.overrides.task)
        return outcome(cfg)
    except UserError as error:
        refuse(error)
    except RunError as error:
        end(error)
    except Exception:  # what leaves this function as an exception would be taken for an error in composing
        traceback.print_exc()
        sys.exit(1)


class WatchSweep(Callback):
    """Checks every point of a sweep before the first one starts, and renders the sweep in the end."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Exit with 2 if a point is refused."""
        try:
            for number, point in enumerate(points(config.hydra.overrides.task)):
                overrides = [*config.hydra.overrides.hydra, *point]
                cfg = checked(hydra.compose(config.hydra.job.config_name, overrides), ranks_of(config.hydra))
                if RANK == 0:
                    check(in_subfolder(cfg, str(number)))
        except INPUT_ERRORS as error:
            refuse(error)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Exit with 1 if a point failed."""
        if RANK == 0 and not render(Path(config.run.dir)):
            sys.exit(1)


def points(overrides: list[str]) -> Iterator[tuple[str, ...]]:
    """Overrides of each point of a sweep over lists; of ranges that a sweeper searches, none is known beforehand."""
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
    """Ranks of a hydra job: those that torchrun started, or the tasks that a launcher starts for each point."""
    nodes, tasks = (OmegaConf.select(job, f"launcher.{name}", default=1) for name in ("nodes", "tasks_per_node"))
    return WORLD_SIZE * nodes * tasks


def checked(composed: DictConfig, ranks: int) -> Config:
    """The typed config, resolved for a number of ranks; raises UserError."""
    try:
        options = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise user_error(error) from error
    cfg = typed(options)
    if cfg.run.dry and ranks > 1:
        raise UserError("run.dry", f"is one process, and {ranks} were started; start it without torchrun")
    if cfg.mesh == AUTO:  # all but the mesh can be checked before there is one
        validate(dataclasses.replace(cfg, mesh=MeshConfig()), (cfg.cluster.gpus or 1) if cfg.run.dry else ranks)
        return cfg
    return validate(cfg, dry_world_size(cfg) if cfg.run.dry else ranks)


def typed(options: Any) -> Config:
    """The options as a config; raises UserError naming the one at fault."""
    return build(Config, {**options, "mesh": AUTO} if options["mesh"] == "auto" else options)


def in_subfolder(cfg: Config, name: str) -> Config:
    """`cfg` with its run folder `name` inside the stated one."""
    return dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, dir=str(Path(cfg.run.dir, name))))


def user_error(error: Exception) -> UserError:
    """What hydra or omegaconf refused, in one line that names the option and the nearest valid name."""
    if isinstance(error, OverrideParseException):
        return UserError(error.override, one_line(error))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        return UserError(group, not_one_of(error.options, choice))
    cause = error.__cause__ or error
    if not isinstance(cause, OmegaConfBaseException):
        return UserError("config", one_line(error))
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        group, _, key = cause.full_key.rpartition(".")
        own = "goes with model=custom, beside the arguments of what it names" if cause.full_key == OWN else None
        return UserError(cause.full_key, own or unknown(key, names_in(group)))
    return UserError(cause.full_key or "config", str(cause).partition("\n")[0])


def names_in(group: str) -> list[str]:
    """Names of the options in a dotted group, none if there is no such group; all groups' for an empty name."""
    options = defaults()
    found = OmegaConf.select(options, group) if group else options
    return [str(name) for name in found] if OmegaConf.is_dict(found) else []


def one_line(error: Exception) -> str:
    """The message of an error on a single line."""
    return " ".join(str(error).split())


def refuse(error: Exception) -> NoReturn:
    """Say in one line what is wrong with the input, on rank 0 unless only another rank knows, and exit with 2."""
    if RANK != 0:
        time.sleep(GRACE_S)  # if rank 0 says the same, torchrun ends this rank meanwhile
    said = error if isinstance(error, UserError) else user_error(error)
    print(f"error: {' '.join(str(said).splitlines())}", file=sys.stderr)  # names of files may have several
    sys.exit(2)


def end(error: RunError) -> NoReturn:
    """Say on rank 0 in one line why a run ends, and exit with 1."""
    if RANK == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(GRACE_S)
    sys.exit(1)


if __name__ == "__main__":
    main()
