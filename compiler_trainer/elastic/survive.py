"""Train, and go on with the ranks that are left whenever one is lost, and with more when others join."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from compiler_trainer.config.errors import Stopped, UserError
from compiler_trainer.config.schema import Config
from compiler_trainer.config.validate import resolve_mesh
from compiler_trainer.elastic.ahead import compiling_ahead
from compiler_trainer.elastic.member import FINISHED, PATIENCE_S, RUN, LeftOut, Member, Regroup, is_member
from compiler_trainer.elastic.shrink import shrunk
from compiler_trainer.step.captured import mesh_of
from compiler_trainer.step.ranks import rank, rejoin


def survive(cfg: Config, train: Callable[[Config], float], save: Callable[[Config], object]) -> float:
    """Train on the ranks of each round until one is not interrupted by a lost rank; return the loss.

    If no mesh fits the ranks that are left, wait for those that replace others; without any, `save` this machine's part
    of the state and exit with the code of a run that should be started again. Raises UserError if `launch` did not
    start this process.
    """
    if not is_member():
        raise UserError("run.elastic", "needs a launcher that outlives ranks; use compiler-trainer launch -n RANKS ...")
    member = Member()
    cfg = replace(cfg, run=replace(cfg.run, dir=member.agree(RUN, cfg.run.dir)))
    first = resolve_mesh(cfg.mesh, member.count)
    while True:
        place, size = member.join()
        mesh = shrunk(member.mesh(first), size)
        if mesh is None and not member.is_joined_soon():
            save(cfg)
            raise Stopped(cfg.run.exit_codes.stopped)
        if mesh is None or place >= (ranks := mesh_of(mesh).world_size):
            member.next_round()
            continue
        local_rank, on_machine = member.take(place, ranks)
        resume = "auto" if member.round else cfg.checkpoint.resume
        job = replace(cfg, mesh=mesh, checkpoint=replace(cfg.checkpoint, resume=resume))
        with compiling_ahead(job, on_machine, quiet=place > 0) if local_rank == 0 else nullcontext():
            result = train_in_round(job, train, member)
        if not isinstance(result, Exception):
            return result
        if not member.next_round(PATIENCE_S):
            raise result


def train_in_round(cfg: Config, train: Callable[[Config], float], member: Member) -> float | Exception:
    """Train in one round; return the loss, or the error that ended the round, with this process out of all groups."""
    with member.watching():
        try:
            loss = train(cfg)
            member.store.set(FINISHED, "")
            return loss
        except UserError:
            raise
        except Exception as error:
            failure = error
        member.tell_trouble()
        failure.add_note("".join(traceback.format_tb(failure.__traceback__)))
        traceback.clear_frames(failure.__traceback__)  # they refer to process groups
        failure.__traceback__ = None
        if isinstance(failure, Regroup):
            member.leave()
        if isinstance(failure, LeftOut) and rank() in failure.ranks:
            member.quit(str(failure))
        gc.collect()
        rejoin()
    return failure
