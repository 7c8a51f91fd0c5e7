"""The checkpoints of a run: choose the one to resume from, save new ones, and copy them to the run's store.

Options of a resumed run that change the meaning of the numbers in its checkpoint are refused, and so is a store that
belongs to another run. Each checkpoint has the position of training and of its data.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from compiler_trainer import checkpoint
from compiler_trainer.checkpoint import Checkpoint, Damaged, RemoteCheckpoints, SaveError, Saver, Sender, TrainState
from compiler_trainer.config.earlier import MEANING, is_in, load_options
from compiler_trainer.config.errors import UserError
from compiler_trainer.config.files import is_remote
from compiler_trainer.config.options import flat
from compiler_trainer.config.schema import CheckpointConfig, Config
from compiler_trainer.console import say
from compiler_trainer.data.loader import Loader
from compiler_trainer.elastic.member import FOLDER, MACHINE
from compiler_trainer.models.subject import Subject
from compiler_trainer.places.cache import cache_of
from compiler_trainer.places.copies import copy_files
from compiler_trainer.places.store import Place
from compiler_trainer.step.ranks import from_rank_0, gather, is_first_of_machine, rank, try_on_rank_0
from compiler_trainer.step.step import Step, programs_of, state_name
from compiler_trainer.training.loggers import announce
from compiler_trainer.training.metrics import Record
from passes.ir import ir

BY_NAME = ("latest", "auto")  # values of `checkpoint.resume` that are not paths
T = TypeVar("T")


def checkpoints_of(cfg: Config) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(cfg.checkpoint.dir or Path(cfg.run.dir, "checkpoints"))


def snapshots_of(cfg: Config) -> Path | None:
    """Return the folder of a run's snapshots, in the memory of this machine; None if this process makes none."""
    return Path(os.environ[FOLDER]) if cfg.run.elastic and FOLDER in os.environ else None


def resumable(cfg: Config) -> list[Path]:
    """Return the checkpoints to try in order, or an empty list to start from scratch; every rank must call this.

    Snapshots have a path on each machine, also on one that lacks them. Raises UserError if `checkpoint.resume=latest`
    finds none.
    """
    if cfg.checkpoint.resume not in BY_NAME:
        return [] if cfg.checkpoint.resume is None else [named_checkpoint(cfg)]
    folder, snapshots = checkpoints_of(cfg), snapshots_of(cfg)
    checkpoints = from_rank_0(lambda: checkpoint.complete(folder))
    if snapshots is not None:
        names = {name for part in gather([path.name for path in checkpoint.complete(snapshots)]) for name in part}
        checkpoints += [snapshots / name for name in sorted(names)]
    checkpoints.sort(key=checkpoint.number_of, reverse=True)
    if not checkpoints and cfg.checkpoint.resume == "latest":
        fix = "set run.dir or checkpoint.dir to those of the run to resume, or give the path of a checkpoint"
        raise UserError("checkpoint.resume", f"is latest, but {folder} contains no complete checkpoint; {fix}")
    return checkpoints


def opened(cfg: Config, path: Path) -> Checkpoint:
    """Return a checkpoint or a snapshot of a run; every rank must call this. Raises UserError and Damaged."""
    is_snapshot = path.parent == snapshots_of(cfg)
    return checkpoint.opened_on_machines(path) if is_snapshot else checkpoint.opened(path)


def named_checkpoint(cfg: Config) -> Path:
    """Return the named checkpoint; one in a store is copied first."""
    name = str(cfg.checkpoint.resume)
    if "/" not in name and not Path(name).exists():
        raise UserError("checkpoint.resume", f"{name} is not a folder here; it takes one, latest, or auto")
    return copy_files(Place(name), Place(name).files(), cache_of(cfg.data)) if is_remote(name) else Path(name)


def first_whole(
    cfg: Config, action: Callable[[Path], T], damaged: tuple[Path, ...] = ()
) -> tuple[T | None, tuple[Path, ...]]:
    """Return the result of `action` for the first checkpoint in which it finds no damage, or None without checkpoints.

    Also return the checkpoints that were skipped: the known `damaged` ones and those found now. Raises Damaged if the
    checkpoint was named, and UserError if all are damaged. Every rank must call this.
    """
    for path in resumable(cfg):
        if path not in damaged:
            try:
                return action(path), damaged
            except Damaged as damage:
                damaged = pass_over(cfg, path, damage, damaged)
    if damaged:
        fix = "remove them, or choose another with checkpoint.resume"
        raise UserError(str(checkpoints_of(cfg)), f"holds {len(damaged)} checkpoints, all of them damaged; {fix}")
    return None, ()


def pass_over(cfg: Config, path: Path, damage: Damaged, damaged: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return `damaged` with `path` added, and report it on rank 0; raise the damage if the checkpoint was named."""
    if cfg.checkpoint.resume not in BY_NAME:
        raise damage
    if rank() == 0:
        print(f"{path} is damaged and passed over: {damage}", file=sys.stderr, flush=True)
    return *damaged, path


# ---- options of a resumed run --------------------------------------------------------------------------

FREE = ("model.name", "optim.lr", "loss.server")
SHOWN = 3


def check_meaning(cfg: Config, saved: Mapping[str, Any], where: str) -> None:
    """Raise UserError if options differ from those in `saved`, unless `checkpoint.allow` lists them.

    Only options that change the meaning of the state count; `where` names the checkpoint.
    """
    ours = flat(dataclasses.asdict(cfg))
    check_names(cfg, ours)
    try:
        theirs = flat(dataclasses.asdict(load_options(Config, saved, where)))
    except UserError as error:
        raise UserError(where, f"was saved with options that do not exist here: {error}") from error
    free = (*FREE, *cfg.checkpoint.allow)
    names = [name for name in dict.fromkeys([*ours, *theirs]) if is_in(name, MEANING) and not is_in(name, free)]
    names_changed = [name for name in names if ours.get(name) != theirs.get(name)]
    if names_changed:
        changes = [
            f"{name} is {ours.get(name)} here and {theirs.get(name)} in {where}" for name in names_changed[:SHOWN]
        ]
        more = f"; and {len(names_changed) - SHOWN} more" if len(names_changed) > SHOWN else ""
        fix = f"restore the old value, or resume with checkpoint.allow=[{','.join(names_changed)}]"
        raise UserError(names_changed[0], f"{'; '.join(changes).removeprefix(names_changed[0] + ' ')}{more}; {fix}")


def check_storable(cfg: Config) -> None:
    """Raise UserError if an option cannot be stored in checkpoints: a number that is not finite, or an object."""
    if not cfg.checkpoint.saves:
        return
    for name, value in flat(dataclasses.asdict(cfg)).items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            fix = "give it as text, or train without checkpoints (checkpoint.interval=null)"
            raise UserError(name, f"{value!r} cannot be stored in a checkpoint; {fix}") from None


def check_names(cfg: Config, options: Mapping[str, Any]) -> None:
    """Raise UserError if `checkpoint.allow` lists something that is not an option."""
    for name in cfg.checkpoint.allow:
        if name != "data" and not any(is_in(option, (name,)) for option in options):
            raise UserError("checkpoint.allow", f"{name} is not an option of this run")


# ---- the run's store -----------------------------------------------------------------------------------


def bring(cfg: Config) -> None:
    """Copy the newest checkpoint of the store to disk if the run may resume from it; every rank must call this.

    Raises UserError on all ranks if the store does not answer or has another run's checkpoints.
    """
    store, folder = cfg.checkpoint.store, checkpoints_of(cfg)
    if store is not None and cfg.checkpoint.resume in BY_NAME:
        try_on_rank_0(lambda: bring_here(store, folder))


def check_store(cfg: Config, done: int) -> None:
    """Raise UserError on all ranks if the store has another run's checkpoints, or any beyond step `done`."""
    store, resume = cfg.checkpoint.store, cfg.checkpoint.resume
    if store is not None and cfg.checkpoint.saves and resume not in BY_NAME:
        if resume is not None and Path(resume).resolve().parent != checkpoints_of(cfg).resolve():
            try_on_rank_0(lambda: check_empty(store))
        try_on_rank_0(lambda: check_ahead(store, done))


def send_rest(cfg: Config) -> None:
    """Copy the checkpoints that the store lacks; raise SaveError if that fails."""
    if cfg.checkpoint.store is not None and rank() == 0:
        sender = Sender(cfg.checkpoint.store, checkpoints_of(cfg), cfg.checkpoint, say)
        if failure := sender.end():
            raise SaveError(failure)


def bring_here(store: str, folder: Path) -> None:
    """Copy the newest checkpoint of this run's store to `folder`."""
    check_same(store, folder)
    checkpoint.bring_newest(store, folder, say)


def check_same(store: str, folder: Path) -> None:
    """Raise UserError if the newest step that both store and folder have is not the same checkpoint."""
    remote = RemoteCheckpoints(store)
    steps = set(remote.steps())
    common = [path for path in checkpoint.complete(folder) if checkpoint.number_of(path) in steps]
    if common and not remote.is_same(common[-1]):
        problem = f"{store} has another run's {common[-1].name} than {folder}"
        raise UserError("checkpoint.store", f"{problem}; choose another store, or another checkpoint.dir")


def check_empty(store: str) -> None:
    """Raise UserError if a store has checkpoints, for a run that starts from a checkpoint elsewhere."""
    if steps := RemoteCheckpoints(store).steps():
        problem = f"{store} has checkpoints of another run, up to step {max(steps):,}"
        raise UserError("checkpoint.store", f"{problem}; choose another store")


def check_ahead(store: str, done: int) -> None:
    """Raise UserError if a store has checkpoints after step `done`."""
    if later := [step for step in RemoteCheckpoints(store).steps() if step > done]:
        fix = "resume from it with checkpoint.resume=auto, or choose another store"
        raise UserError("checkpoint.store", f"{store} has checkpoints up to step {later[-1]:,}; {fix}")


# ---- saving --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Save:
    """A function that saves checkpoints, which are written while training continues; a no-op without a saver."""

    cfg: Config
    saver: Saver | None

    def __call__(self, record: Record, loader: Loader) -> None:
        """Save a checkpoint after the step of `record`, with the loader's current position."""
        if self.saver is not None:
            self.saver.save(state_after(record, loader, self.cfg))

    def wait(self) -> bool:
        """Wait for the last checkpoint; return True if it was written completely, the same on all ranks."""
        return self.saver is not None and not self.saver.wait()

    @property
    def is_writing(self) -> bool:
        """True while the last checkpoint is being written."""
        return self.saver is not None and self.saver.pending is not None and not self.saver.pending.done()


@contextmanager
def saving(cfg: Config, trained: Subject, step: Step) -> Iterator[Save]:
    """Yield a function that saves a checkpoint, and wait for the last one at the end."""
    if not cfg.checkpoint.saves:
        yield Save(cfg, None)
        return
    excluded = left_out(cfg, trained, programs_of(step.train).values())
    with Saver(step, checkpoints_of(cfg), cfg.checkpoint, excluded, say) as saver:
        announce(f"checkpoints {save_times(cfg)}, through {saver.staging.bytes / 2**20:,.1f} MiB of host memory a rank")
        if cfg.checkpoint.store:
            announce(f"each is copied to {cfg.checkpoint.store}")
        yield Save(cfg, saver)


def left_out(cfg: Config, trained: Subject, programs: Iterable[ir.Program]) -> frozenset[str]:
    """Return the names of the state that checkpoints do not store, because it is read from its origin again."""
    return trained.teacher if cfg.checkpoint.frozen else unchanged(trained, programs)


def unchanged(trained: Subject, programs: Iterable[ir.Program]) -> frozenset[str]:
    """Return the names of frozen parameters that no program of a step writes, and of all of the teacher."""
    buffers = {state_name(entry) for program in programs for entry in program.inputs if entry.kind == "buffer"}
    return trained.frozen - (buffers - trained.teacher)


@contextmanager
def snapshots(cfg: Config, trained: Subject, step: Step) -> Iterator[Save]:
    """Yield a function that writes a checkpoint into the memory of the machine, where a lost rank leaves it."""
    folder = snapshots_of(cfg)
    if folder is None:
        yield Save(cfg, None)
        return
    machines = gather(int(os.environ[MACHINE]))
    if cfg.checkpoint.saves and is_first_of_machine():
        checkpoint.link_to_run(folder, checkpoints_of(cfg))
    options = CheckpointConfig(keep=1, resume="auto")
    with Saver(step, folder, options, left_out(cfg, trained, programs_of(step.train).values()), say, machines) as saver:
        place = f"{folder}, and into the next machine's memory" if len({*machines}) > 1 else str(folder)
        size = f"{saver.staging.bytes / 2**20:,.1f} MiB of each rank"
        announce(f"snapshots every {cfg.run.snapshot_interval:,} steps, {size}, into {place}")
        yield Save(cfg, saver)


def save_snapshot(cfg: Config) -> None:
    """Copy the newest snapshot to the run's checkpoints; a process of each machine must call this.

    A rank was lost, maybe before it had written the checkpoint of this step.
    """
    snapshots = snapshots_of(cfg)
    if snapshots is not None:
        checkpoint.bring_to_run(snapshots)


def save_times(cfg: Config) -> str:
    """Return after which steps checkpoints are saved, as text."""
    interval = cfg.checkpoint.interval or 0
    return "after the last step" if interval >= cfg.train.steps else f"every {interval:,} steps and after the last"


def state_after(record: Record, loader: Loader, cfg: Config) -> TrainState:
    """Return the position of training after the step of `record`."""
    return TrainState(
        step=int(record["step"]),
        tokens=int(record["tokens"]),
        data=dict(loader.state_dict()),
        config=dataclasses.asdict(cfg),
        eval_loss=record.get("eval_loss"),
    )
